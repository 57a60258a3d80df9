"""Custom operators: the parts of them that are compiled into a graph, and so belong in its key.

A graph names an operator and no more. The kernel runs as it is when the graph runs; but its fake
implementation, its backward formula and its decomposition are run or traced while the graph is
compiled. torch's key has none of them: whoever corrects a backward formula would get the old one.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING

from s3cache.graph._code import UntoldError, fingerprint
from s3cache.graph._definitions import parts_of
from s3cache.graph._safety import Unsafe, graph_modules, way_out
from s3cache.graph._stable import Component, autograd_words
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import Operator

__all__ = ["function_component", "operator_component"]

_FIX = "import s3cache, torch; s3cache.register_cacheable({}, version='1')  # if you vouch for it"


def operator_component(
    gm: GraphModule, vouched: Callable[[object], str | None]
) -> tuple[Component | None, list[Unsafe]]:
    """A component for the custom operators in ``gm``, if any, and those that have none."""
    texts: list[str] = []
    unsafe: list[Unsafe] = []
    for operator, node in _custom_operators(gm).items():
        if vouched(operator) is not None:
            continue
        try:
            texts.append(f"{operator}: {fingerprint(operator, parts_of(vouched))}")
        except UntoldError as exc:
            name = str(operator)
            fix = _FIX.format(".".join(("torch", "ops", *name.split(".")[:2])))
            unsafe.append(Unsafe("custom-operator", f"calls {name}: {exc}", fix, node, name))
    return (Component.of_text(" ".join(sorted(texts))) if texts else None), unsafe


def function_component(
    gm: GraphModule, vouched: Callable[[object], str | None]
) -> tuple[Component | None, list[Unsafe]]:
    """A component for functions that torch takes for its own by name alone, and those without.

    torch's check knows functions by their names: einops' are in its list, and a function that
    ``functools.wraps`` made of one of torch's bears the name of that one. Their code is traced.
    """
    texts: list[str] = []
    unsafe: list[Unsafe] = []
    for function, node in _other_functions(gm).items():
        name = internals.name_of(function)
        if vouched(function) is not None or autograd_words(function) is not None:
            continue
        try:
            texts.append(f"{name}: {fingerprint(function, parts_of(vouched))}")
        except UntoldError as exc:
            message = f"calls what bears the name {name}, and {exc}"
            unsafe.append(Unsafe("function", message, way_out(function), node, name))
    return (Component.of_text(" ".join(sorted(texts))) if texts else None), unsafe


def _other_functions(gm: GraphModule) -> dict[types.FunctionType, str]:
    """Functions in Python whose code is not torch's, and a node that calls each."""
    callers: dict[types.FunctionType, str] = {}
    torchs = set()
    for _, module in graph_modules(gm):
        for node in module.graph.nodes:
            target: object = node.target
            if not isinstance(target, types.FunctionType) or target in torchs:
                continue
            if internals.has_code_of_torch(target):
                torchs.add(target)
            elif not node.meta.get(internals.WRAPPED_HASH):
                callers[target] = node.name
    return callers


def _custom_operators(gm: GraphModule) -> dict[Operator, str]:
    """Operators that are not ATen's, and a node that calls each."""
    overload, packet = internals.operator.get(), internals.operator_packet.get()
    callers: dict[Operator, str] = {}
    for _, module in graph_modules(gm):
        for node in module.graph.nodes:
            target: object = node.target
            if isinstance(target, overload):
                operators = [target]
            elif isinstance(target, packet):
                operators = [getattr(target, name) for name in target.overloads()]
            else:
                continue
            callers.update(
                (operator, node.name) for operator in operators if operator.namespace != "aten"
            )
    return callers
