"""Describe the values of a traced graph: what the second level's key holds beside its code.

A fake implementation that answers with other sizes or strides changes no line of the graph that is
traced, but it does change the code that is made of that graph. So does a view in place of a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING

from s3cache.graph._safety import graph_modules
from s3cache.graph._stable import Component, bounded

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule, Node

__all__ = ["traced_values"]

# Where in the program a node comes from, and numbers that count graphs of the process. They name
# things in the code, and decide nothing after the graph was partitioned.
_ORIGINS = frozenset(
    {
        "ac_graph_id",
        "autograd_backward",
        "desc",
        "from_node",
        "fwd_nn_module_stack",
        "fwd_source_fn_stack",
        "nn_module_stack",
        "original_aten",
        "output_stack_traces",
        "seq_nr",
        "source_fn_stack",
        "stack_trace",
        "torch_fn",
    }
)
# torch repeats ``val`` there, and `graph.annotations` is a component of its own.
_ELSEWHERE = frozenset({"custom", "tensor_meta"})
_LEFT_OUT = _ORIGINS | _ELSEWHERE
_MAX_DEPTH = 6


def traced_values(gm: GraphModule) -> Component:
    """Return a component of the metadata of every value in ``gm``, and of the storages they share.

    It has what each node's ``meta`` says of values (``val`` and others), and its plain marks, but
    not where in the program the node comes from.
    """
    values = _Values()
    lines = [
        (f"{name}.{node.name}".lstrip("."), values.text_of(node))
        for name, module in graph_modules(gm)
        for node in module.graph.nodes
    ]
    data = "\n".join(f"{name}: {text}" for name, text in lines).encode()
    return Component.of_bytes(data, f"{len(lines)} values", bounded(lines))


class _Values:
    """Texts of the values of one graph; storages are numbered in the order they are met in."""

    def __init__(self) -> None:
        from torch import SymBool, SymFloat, SymInt, Tensor

        self._tensor, self._symbolic = Tensor, (SymInt, SymFloat, SymBool)
        self._texts: dict[int, tuple[object, str]] = {}
        self._storages: dict[int, tuple[int, object]] = {}

    def text_of(self, node: Node) -> str:
        meta = node.meta
        return " ".join(
            f"{name}={text}"
            for name in sorted(meta)
            if name not in _LEFT_OUT and (text := self._text(meta[name], 0))
        )

    def _text(self, value: object, depth: int) -> str:
        """Return the text of a value, or ``""`` for an object that is no value of a graph."""
        if isinstance(value, self._tensor):
            known = self._texts.get(id(value))
            if known is None:
                # The tensor is kept, as another one may get the id of one that is gone.
                known = self._texts[id(value)] = value, self._tensor_text(value)
            return known[1]
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str):
            return repr(value)
        if isinstance(value, self._symbolic):
            return str(value)
        if depth < _MAX_DEPTH:
            if isinstance(value, dict):
                items = (
                    f"{self._text(key, depth + 1)}:{self._text(item, depth + 1)}"
                    for key, item in value.items()
                )
                return f"{{{','.join(items)}}}"
            if isinstance(value, (list, tuple)):
                return f"({','.join(self._text(item, depth + 1) for item in value)})"
            if isinstance(value, (set, frozenset)):
                return f"({','.join(sorted(self._text(item, depth + 1) for item in value))})"
        return str(value) if kind.__module__ == "torch" and kind.__name__ in _CONSTANTS else ""

    def _tensor_text(self, value: Tensor) -> str:
        words = [*map(str, _DESCRIBING(value)), f"[{','.join(map(str, value.shape))}]"]
        words += [name for name, is_it in _FLAGS if is_it(value)]
        try:
            strides, offset = value.stride(), value.storage_offset()
            storage = value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper
            return " ".join([*words, *self._inner(value)])
        number, base = self._storages.setdefault(storage, (len(self._storages), offset))
        words += [f"({','.join(map(str, strides))})", f"@{number}+{offset - base}"]  # type: ignore[operator]
        return " ".join(words)

    def _inner(self, value: Tensor) -> Iterator[str]:
        flatten = getattr(value, "__tensor_flatten__", None)
        for name in flatten()[0] if flatten is not None else ():
            yield f"{name}={self._text(getattr(value, name), 1)}"


_CONSTANTS = frozenset({"device", "dtype", "layout", "memory_format"})
_DESCRIBING = attrgetter("dtype", "device", "layout")
_FLAGS = (
    ("grad", attrgetter("requires_grad")),
    ("conj", methodcaller("is_conj")),
    ("neg", methodcaller("is_neg")),
)
