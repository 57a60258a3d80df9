"""Tensor subclasses: whether other code than torch's stands behind those in a graph.

Dynamo leaves a subclass in its graph as one tensor. AOTAutograd takes it apart, and runs what its
class does in place of each operator (``__torch_dispatch__``). So a graph with a subclass that is
not torch's own is shared at the second level, where what was traced is in the key.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from s3cache.graph._homes import home_of, name_of
from s3cache.graph._origin import is_foreign
from s3cache.graph._safety import Unsafe, graph_modules, way_out
from s3cache.graph._stable import Component
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["subclass_component"]


def subclass_component(
    gm: GraphModule | None, inputs: Iterable[object], registered: Callable[[object], str | None]
) -> tuple[Component | None, list[Unsafe]]:
    """Return a component for the tensor subclasses in a graph, if any, and those not torch's own.

    It has their names, versions that the user registered, and what torch itself sets and takes back
    in their tables (``loss_parallel()``).
    """
    texts: list[str] = []
    unsafe: list[Unsafe] = []
    for kind, met in _classes(gm, inputs).items():
        name, where = f"{kind.__module__}.{kind.__qualname__}", met.where
        version = registered(kind)
        if version is not None:
            texts.append(f"{name}: version {version}")
            continue
        foreign = next(_foreign(kind, met.carried, registered), None)
        if foreign is not None:
            message = f"works on a {name}, and {foreign} takes part in tracing"
            unsafe.append(Unsafe("subclass", message, way_out(kind), where, name))
            continue
        handled = sorted(
            f"{operator} {name_of(handler)}"
            for operator, handler in internals.sharding_handlers(kind)
        )
        versions = sorted(f"version {_version(each, registered)}" for each in met.carried.values())
        texts.append(f"{name}: {' '.join((*handled, *versions))}")
    return (Component.of_text(" ".join(sorted(texts))) if texts else None), unsafe


def _foreign(
    kind: type, carried: dict[int, object], registered: Callable[[object], str | None]
) -> Iterator[str]:
    """Yield what is not torch's of the code behind a subclass."""
    if home_of(kind).kind != "torch":
        yield "its class"
    for each in carried.values():
        if _version(each, registered) is None:
            yield f"{name_of(each)}, which it carries,"
    for operator, rule in internals.sharding_rules(kind):
        if _is_users(rule):
            yield f"a rule for {operator}"


def _version(carried: object, registered: Callable[[object], str | None]) -> str | None:
    version = registered(carried)
    return registered(type(carried)) if version is None else version


# Rules of torch's own: a thousand, and they stay.
_torchs: dict[int, object] = {}


def _is_users(rule: object) -> bool:
    if id(rule) in _torchs:
        return False
    if is_foreign(rule, "") or is_foreign(getattr(rule, "func", None), ""):
        return True
    _torchs[id(rule)] = rule
    return False


class _Met(NamedTuple):
    """Where a class was met first, and what of the user's tensors of it carry, by identity."""

    where: str
    carried: dict[int, object]


def _classes(gm: GraphModule | None, inputs: Iterable[object]) -> dict[type, _Met]:
    """Return the classes with code of their own, and those of libraries' objects they carry."""
    found: dict[type, _Met] = {}

    def meet(value: object, where: str) -> None:
        for kind, carried in _kinds(value):
            met = found.setdefault(kind, _Met(where, {}))
            met.carried.update((id(each), each) for each in carried)

    for index, value in enumerate(inputs):
        meet(value, f"input {index}")
    for name, module in graph_modules(gm) if gm is not None else ():
        for attribute, value in vars(module).items():
            meet(value, f"{name}.{attribute}".strip("."))
        for node in module.graph.nodes:
            made = node.meta.get("example_value")
            for value in made if isinstance(made, (list, tuple)) else (made,):
                meet(value, node.name)
    return found


def _kinds(value: object) -> Iterator[tuple[type, list[object]]]:
    import torch

    kind = type(value)
    if not isinstance(value, torch.Tensor) or kind in _plain():
        return
    carried: list[object] = []
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        names, context = flatten()
        for name in names:
            yield from _kinds(getattr(value, name))
        carried = list(_carried(context))
    dispatches = getattr(kind, "__torch_dispatch__", None)
    if carried or dispatches is not torch.Tensor.__torch_dispatch__:
        yield kind, carried


def _carried(context: object) -> Iterator[object]:
    """Yield what a subclass keeps beside its tensors that has code, and is not torch's."""
    if isinstance(context, dict):
        context = [*context.keys(), *context.values()]
    if isinstance(context, (list, tuple, set, frozenset)):
        for each in context:
            yield from _carried(each)
    elif isinstance(context, (types.FunctionType, types.MethodType, functools.partial, type)):
        if home_of(context).kind in ("library", "user"):
            yield context
    elif home_of(type(context)).kind in ("library", "user"):
        yield context


@functools.cache
def _plain() -> tuple[type, ...]:
    """Return the classes of tensors that do nothing of their own where a graph has them."""
    import torch

    return torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, internals.fake_tensor.get()
