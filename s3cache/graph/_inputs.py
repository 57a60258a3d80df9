"""What compiled code depends on in a graph's inputs and nodes that torch's key leaves out.

Each is a component only where there is something to say, so that most keys do not have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from s3cache.graph._key import Component

__all__ = ["graph_components", "input_components"]


def input_components(inputs: Sequence[Any]) -> dict[str, Component]:
    """Components of how inputs are related, to each other and to autograd."""
    texts = {
        "inputs.sharing": _sharing(inputs),
        "inputs.non_leaf": _non_leaf(inputs),
        "inputs.bounds": _bounds(),
    }
    return {name: Component.of_text(text) for name, text in texts.items() if text}


def graph_components(gm: Any, pickled: Callable[[Any], bytes]) -> dict[str, Component]:
    """Components of what nodes carry and of tensors that the graph holds itself.

    Raises:
        Exception: what torch's pickler raises for an annotation that it cannot pickle.
    """
    found = {}
    if annotations := _annotations(gm):
        data = b"".join(each.encode() + pickled(value) for each, value in annotations)
        nodes = " ".join(name for name, _ in annotations)
        found["graph.annotations"] = Component.of_bytes(data, nodes)
    if constants := "; ".join(_constants(gm)):
        found["graph.constants"] = Component.of_text(constants)
    return found


def _sharing(inputs: Sequence[Any]) -> str:
    """Which inputs are in one storage, and where in it.

    Code for inputs that overlap reads one after it has written the other; torch's key is the same
    for inputs that do not.
    """
    from torch import Tensor

    groups: dict[Any, list[int]] = {}
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor):
            storage = _storage(value)
            if storage is not None:
                groups.setdefault(storage, []).append(index)
    return "; ".join(
        " ".join(f"{index}@{inputs[index].storage_offset()}" for index in group)
        for group in groups.values()
        if len(group) > 1
    )


def _storage(value: Any) -> Any:
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors, wrapper subclasses
        return None


def _non_leaf(inputs: Sequence[Any]) -> str:
    """Inputs that autograd reached already: what mutates them is a part of the graph."""
    from torch import Tensor

    return " ".join(
        str(index)
        for index, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf
    )


def _bounds() -> str:
    """Bounds that the user set for sizes, e.g. by ``mark_dynamic(..., max=8)``.

    Guards are no part of a key: those of an entry become guards of the program that it is a hit
    for. Where the user set bounds, guards that are narrower than they would be an error there.
    """
    import torch

    context = torch._guards.TracingContext.try_get()
    shape_env = (
        None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    )
    found = set()
    for each in getattr(shape_env, "tracked_fakes", None) or ():
        constraints = getattr(each.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(
            each.fake.shape if constraints else (), constraints, strict=True
        ):
            bounds = getattr(constraint, "vr", None)
            if bounds is not None:
                found.add(f"{size} in [{bounds.lower}, {bounds.upper}]")
    return " ".join(sorted(found))


def _annotations(gm: Any) -> list[tuple[str, Any]]:
    """``torch.fx.traceback.annotate`` and the like; torch's pickler drops ``node.meta``."""
    import torch

    return [
        (f"{name}.{index}", node.meta["custom"])
        for name, module in gm.named_modules()
        if isinstance(module, torch.fx.GraphModule)
        for index, node in enumerate(module.graph.nodes)
        if node.meta.get("custom")
    ]


def _constants(gm: Any) -> Iterable[str]:
    """Values of tensors that are no parameters: of those, code may hold the values."""
    import torch

    for name, module in gm.named_modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for attribute, value in sorted(vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute} {_values(value)}"


def _values(value: Any) -> str:
    import torch

    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        if type(value) is not torch.Tensor or value.is_sparse or value.is_quantized:
            return repr(value)
        data = value.cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(bytes(_numbers(data))).hexdigest()


def _numbers(data: Any) -> list[int]:
    numbers: list[int] = data.tolist()
    return numbers
