"""Load the graph of a frame that was not traced, without importing Inductor."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from s3cache.features.recall import names
from s3cache.features.recall.sources import Plain, RefusedError
from s3cache.hooks import AOT, Lookup, conditions_of
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from s3cache.hooks import Session

_R = TypeVar("_R")


def rebuilt(
    session: Session,
    key: str,
    inputs: Sequence[object],
    sources: Sequence[object],
    held: Sequence[object],
    lowered: Sequence[str | None],
    as_before: Callable[[], bool],
) -> Function[object] | None:
    """Return the callable of an untraced graph under ``key``; None on a miss.

    The graph holds ``held``, the first inputs, and is called with the others.
    ``lowered`` are digests of the settings of its backward, without and with threads.
    ``as_before`` returns whether the settings are unchanged since this call.
    """
    lookups = session.lookups
    lookup = Lookup(level=AOT, key=key, inputs=inputs, sources=sources)
    mode = internals.fake_mode.get()(shape_env=internals.shape_env.get()())
    with (
        internals.tracing.get()(internals.tracing_context.get()(mode)),
        lookups.searching(lookup) as candidates,
    ):
        for result, _, _ in candidates:
            conditions = conditions_of(result)
            if conditions is None or not _fits(result, inputs):
                continue
            if conditions["lowered"] == lowered[conditions["of_threads"]]:
                lookup.as_before = as_before
            result.guards_expr = None  # the frame that calls it has the guards
            return _call(result, lookups.make_callable, held)
        lookup.entries = None  # Dynamo traces now, and that lookup counts
    return None


class _Debug:
    """A stand-in for ``torch._inductor.debug``, which compiled graphs use on every call.

    An import of the real module replaces it.
    """

    RECORD_GRAPH_EXECUTION = False

    def __getattr__(self, name: str) -> object:
        return getattr(names.debug.get(), name)


def _fits(result: Any, inputs: Sequence[object]) -> bool:
    """Return whether the guards on sizes in torch's entry hold for real inputs."""
    values = [value for value in inputs if type(value) is int]
    shapes, guards = internals.shape_env.get()(), result.guards_expr
    return not guards or bool(shapes.evaluate_guards_expression(guards, values))


def _call(
    result: Any, wrap: Function[Function[object]], held: Sequence[object]
) -> Function[object]:
    """Make a callable of an entry."""
    names.inductor.get().__dict__.setdefault("debug", _Debug())
    inductor = internals.inductor_config.get()
    boxed = {
        "cudagraphs": names.boxed_bool.get()(bool(inductor.triton.cudagraphs)),
        "boxed_forward_device_index": names.boxed_index.get()(None),
    }
    compiled = wrap(result, [], result.sanitized_aot_config, boxed)

    def forward(*inputs: object) -> object:
        return compiled([*held, *inputs])

    return forward


_GRAPH: Final = "torch._inductor.graph"
_STAND_IN: Final = "_s3cache_graph"


def without_graph(function: Function[_R]) -> Function[_R]:
    """Return ``function`` without its use of Inductor's graph class, unless that is imported."""
    return function if _GRAPH in sys.modules else _without_graph(function)


@functools.cache
def _without_graph(function: Function[_R]) -> Function[_R]:
    if not isinstance(function, FunctionType) or "graph" not in function.__code__.co_names:
        return function
    module = ModuleType(f"torch._inductor.{_STAND_IN}")
    # Tests use an attribute of the class to show the code of a graph.
    vars(module)["GraphLowering"] = type("GraphLowering", (), {"save_output_code": None})
    sys.modules[module.__name__] = module
    names = tuple(_STAND_IN if name == "graph" else name for name in function.__code__.co_names)
    code = function.__code__.replace(co_names=names)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# -- graphs that DDP splits into parts


def split_rows(split: Any) -> list[Plain] | None:
    """Return the sequence of calls of DDP's parts of a graph; None if it has no parts.

    A row is a call of a part with its arguments and whether it returns one value, or an item of a
    value; the last row is the output. Values are numbered: inputs first, then results of rows.

    Raises:
        RefusedError: the graph has other operations.
    """
    import torch

    if not isinstance(split, torch.fx.GraphModule):
        return None
    numbers: dict[Any, int] = {}

    def written(value: Any) -> Plain:
        if isinstance(value, torch.fx.Node):
            return ["value", numbers[value]]
        if isinstance(value, (tuple, list)):
            return [type(value).__name__, [written(each) for each in value]]
        if value is None or type(value) in (bool, int, float, str):
            return ["constant", value]
        raise RefusedError("graphs", f"passes a {type(value).__qualname__} to a part of DDP")

    rows: list[Plain] = []
    for node in split.graph.nodes:
        if node.op == "call_module" and not node.kwargs:
            single = bool(split.get_submodule(node.target).unwrap_singleton_tuple)
            rows.append(["part", written(list(node.args)), single])
        elif node.op == "call_function" and node.target is operator.getitem:
            rows.append(["item", *map(written, node.args)])
        elif node.op == "output":
            rows.append(["output", written(node.args[0])])
        elif node.op != "placeholder":
            raise RefusedError("graphs", f"has parts of DDP with {node.op}")
        if node.op != "output":
            numbers[node] = len(numbers)
    return rows


def joined(rows: Sequence[Plain], parts: Iterable[Callable[..., Any]]) -> Callable[..., object]:
    """Return a function that calls DDP's parts as described by rows of :func:`split_rows`."""
    functions = iter([*parts])
    steps = [(row, next(functions) if row[0] == "part" else None) for row in rows]

    def read(value: Plain, values: list[Any]) -> Any:
        kind, content = value
        if kind == "value":
            return values[content]
        if kind == "constant":
            return content
        items = [read(each, values) for each in content]
        return tuple(items) if kind == "tuple" else items

    def run(*inputs: object) -> object:
        values: list[Any] = [*inputs]
        for (kind, *args), part in steps:
            if kind == "output":
                return read(args[0], values)
            if part is None:
                values.append(read(args[0], values)[read(args[1], values)])
                continue
            result = part(*read(args[0], values))
            values.append(result[0] if args[1] and isinstance(result, (tuple, list)) else result)
        return None

    return run
