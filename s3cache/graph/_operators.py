"""Custom operators: whether other code than torch's takes part in tracing them.

A graph names an operator and no more. Its kernel runs when the graph runs, and is in no entry. But
its fake implementation, its backward formula, its rules for vmap and autocast, and its
decomposition are called while the graph is traced: a graph with such an operator is shared at the
second level, where what was traced is in the key.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from s3cache.graph._identity import UnidentifiedError, identity
from s3cache.graph._kernels import is_of_torch
from s3cache.graph._safety import Unsafe, graph_modules, way_out
from s3cache.graph._stable import Component, autograd_words
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import Operator

__all__ = ["function_component", "operator_component", "refaked_operators"]

# Keys under which a kernel runs when the graph runs. What is registered under any other is called
# while the graph is traced.
_AT_RUN_TIME = re.compile(
    r"debug|((Sparse|SparseCsr|Nested\w*?|Quantized)?"
    r"(CPU|CUDA|HIP|XPU|MPS|MTIA|HPU|PrivateUse1))(\[alias\])?"
)
_FIX = "import s3cache, torch; s3cache.register_cacheable({}, version='1')  # {}"


def operator_component(
    gm: GraphModule, registered: Callable[[object], str | None], *, traced: bool
) -> tuple[Component | None, list[Unsafe]]:
    """Return a component for the custom operators in ``gm``, if any, and reasons against a key.

    The component has what Inductor reads of an operator: its schema, and its tags.

    Args:
        traced: whether the key has what was traced, so that rules of an operator do not matter.
    """
    texts: list[str] = []
    unsafe: list[Unsafe] = []
    for operator, node in _custom_operators(gm).items():
        name = str(operator)
        version = registered(operator)
        texts.append(f"{operator._schema} {sorted(map(str, operator.tags))} {version or ''}")
        if version is None and not traced:
            rule = _rule_of(operator)
            if rule:
                message = f"calls {name}, and {rule} is code that takes part in tracing"
                unsafe.append(Unsafe("custom-operator", message, _fix(name), node, name))
    return (Component.of_text("; ".join(sorted(texts))) if texts else None), unsafe


def refaked_operators(
    gm: GraphModule, registered: Callable[[object], str | None]
) -> tuple[Component | None, list[Unsafe]]:
    """Return the identities of fake implementations that see other inputs than those traced.

    Inductor calls a fake implementation again as it generates code. Its inputs are laid out as they
    were traced, except where a tag of the operator, or an option of torch, leaves that to Inductor.
    """
    texts: list[str] = []
    unsafe: list[Unsafe] = []
    for operator, node in _custom_operators(gm).items():
        if registered(operator) is not None or not internals.has_flexible_layout(operator):
            continue
        name = str(operator)
        definition = internals.custom_operators.get().get(operator.name())
        fakes = internals.fake_registry.get().get(operator.name())
        kernel = None if fakes is None else fakes.fake_impl.kernel
        fake = kernel and kernel.func if definition is None else definition._abstract_fn
        try:
            if fake is None and definition is None:
                raise UnidentifiedError("is not in Python")
            texts.append(f"{name}: {identity(fake, registered)}")
        except UnidentifiedError as exc:
            message = f"Inductor lays out inputs of {name}, and its fake implementation {exc}"
            unsafe.append(Unsafe("generator", message, _fix(name), node, name))
    return (Component.of_text("; ".join(sorted(texts))) if texts else None), unsafe


def _fix(name: str) -> str:
    where = ".".join(("torch", "ops", *name.split(".")[:2]))
    return _FIX.format(where, "if its rules depend on their inputs alone")


def function_component(
    gm: GraphModule, registered: Callable[[object], str | None]
) -> tuple[Component | None, list[Unsafe]]:
    """Return a component for functions that torch's check knows by name, and those that are others.

    einops' are in its list, and count as torch's own. A function that ``functools.wraps`` made of
    one of torch's bears the name of that one, and does not.
    """
    texts: list[str] = []
    unsafe: list[Unsafe] = []
    for function, node in _other_functions(gm).items():
        name = internals.name_of(function)
        if registered(function) is not None or autograd_words(function) is not None:
            continue
        try:
            texts.append(f"{name}: {identity(function, registered)}")
        except UnidentifiedError as exc:
            message = f"calls what bears the name {name}, and {exc}"
            unsafe.append(Unsafe("function", message, way_out(function), node, name))
    return (Component.of_text(" ".join(sorted(texts))) if texts else None), unsafe


def _other_functions(gm: GraphModule) -> dict[types.FunctionType, str]:
    """Return Python functions that are not torch's, and a node that calls each."""
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
    """Return operators that torch does not define, and a node that calls each."""
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
                (operator, node.name)
                for operator in operators
                if operator.namespace != "aten" and not is_of_torch(operator.name())
            )
    return callers


def _rule_of(operator: Operator) -> str:
    """Return what is called while ``operator`` is traced, and is not torch's; ``""`` if nothing."""
    return next(_rules(operator), "")


def _rules(operator: Operator) -> Iterator[str]:
    name = operator.name()
    definition = internals.custom_operators.get().get(name)
    if definition is not None:
        given = {
            "its fake implementation": definition._abstract_fn,
            "its backward formula": definition._backward_fn or definition._setup_context_fn,
            "its vmap rule": definition._vmap_fn,
            "its autocast rule": internals.autocast_dtypes(definition),
            "its rule for a tensor subclass": definition._torch_dispatch_fns,
        }
        yield from (what for what, rule in given.items() if rule)
    fakes = internals.fake_registry.get().get(name)
    if definition is None and fakes is not None and fakes.fake_impl.kernel is not None:
        yield "its fake implementation"
    if fakes is not None and fakes.torch_dispatch_rules._data:
        yield "its rule for a tensor subclass"
    for key in operator.py_kernels:
        yield f"its kernel for {key}"
    for key, path in internals.REGISTERED_AT.findall(internals.dispatch_dump.get()(name)):
        # For a definition in Python, torch registers what dispatches to the functions above.
        of_torch = definition is not None and path.startswith(internals.torch_directory())
        if not of_torch and not _AT_RUN_TIME.fullmatch(key):
            yield f"its kernel for {key}"
