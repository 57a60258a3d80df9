"""Tensor subclasses: the code by which they take part in a graph while it is compiled.

Dynamo leaves a subclass in its graph as one tensor. AOTAutograd takes it apart, and runs what its
class does in place of each operator (``__torch_dispatch__``): that is compiled, and torch's key has
no more of it than the name of the class.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from s3cache.graph._code import UntoldError, fingerprint
from s3cache.graph._definitions import parts_of
from s3cache.graph._homes import home_of, name_of
from s3cache.graph._reads import closure_of
from s3cache.graph._safety import Unsafe, graph_modules, way_out
from s3cache.graph._stable import Component
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["subclass_component"]


def subclass_component(
    gm: GraphModule | None, inputs: Iterable[object], vouched: Callable[[object], str | None]
) -> tuple[Component | None, list[Unsafe]]:
    """A component for the classes of tensors in a graph that have code of their own, if any."""
    texts: list[str] = []
    unsafe: list[Unsafe] = []
    for kind, met in _classes(gm, inputs).items():
        name, where = f"{kind.__module__}.{kind.__qualname__}", met.where
        version = vouched(kind)
        if version is not None:
            texts.append(f"{name}: version {version}")
            continue
        rules = [each for each in internals.sharding_rules(kind) if _is_users(each[1])]
        carried = [vouched(type(each)) or each for each in met.carried.values()]
        # torch's own are put there and taken away again: by loss_parallel(), for one.
        handled = sorted(
            f"{operator} {name_of(handler)}"
            for operator, handler in internals.sharding_handlers(kind)
        )
        rules.sort(key=lambda rule: str(rule[0]))
        whole = [kind, *rules, *carried, *handled]
        try:
            texts.append(f"{name}: {fingerprint(whole, parts_of(vouched))}")
        except UntoldError as exc:
            message = f"works on a {name}, whose code {exc}"
            unsafe.append(Unsafe("subclass", message, way_out(kind), where, name))
    return (Component.of_text(" ".join(sorted(texts))) if texts else None), unsafe


# Rules of torch's own: a thousand, and they stay.
_torchs: dict[int, object] = {}


def _is_users(rule: object, depth: int = 0) -> bool:
    """Whether a rule is code of the user's, which torch may have wrapped."""
    if id(rule) in _torchs:
        return False
    if isinstance(rule, types.FunctionType):
        if home_of(rule).kind != "torch":
            return True
        held = [*closure_of(rule).values()]
    elif isinstance(rule, functools.partial):
        held = [rule.func, *rule.args, *rule.keywords.values()]
    else:
        held = [getattr(rule, "func", None)]
    found = depth < _WRAPPERS and any(_is_users(each, depth + 1) for each in held)
    if not found and depth == 0:
        _torchs[id(rule)] = rule
    return found


_WRAPPERS = 5


class _Met(NamedTuple):
    """Where a class was met first, and what of the user's tensors of it carry, by identity."""

    where: str
    carried: dict[int, object]


def _classes(gm: GraphModule | None, inputs: Iterable[object]) -> dict[type, _Met]:
    """Classes with code of their own, and those of libraries' objects that they carry."""
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
        for each in _carried(context):
            if home_of(type(each)).kind == "library":
                yield type(each), []
            else:
                carried.append(each)
    dispatches = getattr(kind, "__torch_dispatch__", None)
    if carried or dispatches is not torch.Tensor.__torch_dispatch__:
        yield kind, carried


def _carried(context: object) -> Iterator[object]:
    """What a subclass keeps beside its tensors and pickling says too little of.

    Objects of classes of the user's say themselves what is pickled of them; functions and classes
    are pickled by their names.
    """
    if isinstance(context, dict):
        context = [*context.keys(), *context.values()]
    if isinstance(context, (list, tuple, set, frozenset)):
        for each in context:
            yield from _carried(each)
    elif isinstance(context, (types.FunctionType, types.MethodType, functools.partial, type)) or (
        home_of(type(context)).kind in ("library", "user")
    ):
        yield context


@functools.cache
def _plain() -> tuple[type, ...]:
    """Classes of tensors that do nothing of their own where a graph has them."""
    import torch

    return torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, internals.fake_tensor.get()
