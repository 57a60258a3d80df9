"""Operators, what is registered for them, and torch's own code and namespaces."""

from __future__ import annotations

import builtins
import functools
import operator as operators
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, cast

from s3cache.torch_api import (
    AnyClass,
    AnyFunction,
    AnyObject,
    Fields,
    Internal,
    Predicate,
    installed_release,
)
from s3cache.torch_api.protocols import Function, Operator

# -- torch's own code

_disable_dynamo = AnyFunction("torch._compile:_disable_dynamo")
_qualified_name = Internal[Callable[[object], str]]("torch.fx.node:_get_qualified_name")
_is_from_torch = Predicate("torch.fx.graph:_is_from_torch")


@functools.cache
def torch_directory() -> str:
    """Return where torch is installed, with a separator at the end. Imports torch."""
    import torch

    return os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def has_code_of_torch(function: FunctionType) -> bool:
    """Return whether the code lies in a file of torch's, whatever the function is called."""
    return function.__code__.co_filename.startswith(torch_directory())


def is_kept_from_dynamo(function: object, inner: object) -> bool:
    """Return whether ``function`` does what ``inner`` does, and Dynamo does not look into it.

    torch makes such a function of ``torch.manual_seed`` when Dynamo is imported.
    """
    if not isinstance(function, FunctionType):
        return False
    codes = _disable_dynamo.get().__code__.co_consts
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__ in codes and any(content is inner for content in cells)


def name_of(function: object) -> str:
    """Return the name by which torch's check knows a function, or a custom operator."""
    function = getattr(function, "_opoverload", function)  # of torch.library.custom_op
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '<none>')}"


def name_in_code(function: object) -> str | None:
    """Return how generated code writes a function or class of torch's or Python's, or None."""
    import torch

    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        return None
    for module in (builtins, operators):
        if getattr(module, name, None) is function:
            return f"{module.__name__}.{name}"
    is_method = isinstance(function, (MethodDescriptorType, WrapperDescriptorType))
    if is_method and getattr(torch.Tensor, name, None) is function:
        return f"torch.Tensor.{name}"
    return _qualified_name.get()(function) if _is_from_torch.get()(function) else None


# Prefixes of modules that trace and lower graphs. Not Dynamo's: what it makes of a program is in
# the key.
_MAKING_CODE = tuple(
    """
    torch._decomp torch._functorch torch._higher_order_ops torch._inductor torch._library
    torch._numpy torch._ops torch._prims torch._refs torch._subclasses torch.distributed.tensor
    torch.fx torch.nested._internal torch.utils._python_dispatch torch.utils._sympy
    torch.utils.checkpoint
    """.split()  # noqa: SIM905 - as all of these
)
# These keep what was made, or run it.
_KEEPING_CODE = tuple(
    """
    torch._functorch._aot_autograd.autograd_cache torch._inductor.codecache
    torch._inductor.remote_cache torch._inductor.runtime.
    """.split()  # noqa: SIM905
)
#: A class into which torch puts the code of each graph that it reads.
EXCHANGED = "torch.fx.graph_module._CodeOnlyModule"


def makes_code(module: str) -> bool:
    """Return whether functions of the module of that name trace or lower graphs."""
    return module.startswith(_MAKING_CODE) and not module.startswith(_KEEPING_CODE)


# -- namespaces and tables

#: Where programs may put functions in place of torch's, beside ``_s3cache_autoload.PLACES``: what
#: is imported with the compiler.
LATER_PLACES = (
    "torch._inductor.decomposition:decompositions",
    "torch._inductor.decomposition:extra_random_decomps",
    "torch._inductor.lowering:lowerings",
    "torch._inductor.lowering:user_lowerings",
    "torch._inductor.lowering:_maybe_layout_constraints",
    "torch._higher_order_ops.utils:registered_hop_fake_fns",
    "torch._subclasses.fake_tensor:_DISPATCH_META_HANDLERS",
    "torch._inductor.decomposition",
    "torch._inductor.lowering",
)
#: Names that compute nothing while something is compiled; programs replace these often.
NOT_COMPILED = frozenset(
    """
    __deepcopy__ __dir__ __format__ __reduce_ex__ __repr__ __setstate__ __slotnames__ __str__
    backward compile initial_seed load manual_seed save seed set_printoptions share_memory_ typename
    """.split()  # noqa: SIM905 - one word a line would be longer
)
# Where torch._VF finds its functions, if nothing of the same name was put into itself.
_variable_functions = AnyClass("torch._C:_VariableFunctionsClass")


def contents(place: str) -> Mapping[object, object] | None:
    """Return what is in a namespace, class or table now; ``None`` until it is imported."""
    module, _, name = place.partition(":")
    found: Any = sys.modules.get(module)
    if name:
        found = getattr(found, name, None)
    return found if found is None or isinstance(found, dict) else vars(found)


def is_table(place: str) -> bool:
    """Return whether all that is in it is used, by whatever name it is in there."""
    return isinstance(contents(place), dict) and ":" in place


def is_shadowed(place: str, name: str) -> bool:
    """Return whether torch would find another ``name`` if it were not in that namespace."""
    module, _, kind = place.partition(":")
    if kind:
        bases = getattr(sys.modules[module], kind).__mro__[1:]
        return any(name in vars(base) for base in bases)
    return hasattr(builtins, name) or (
        module == "torch._VF" and hasattr(_variable_functions.get(), name)
    )


# -- operators

operator = Internal[type[Operator]]("torch._ops:OpOverload")
operator_packet = AnyClass("torch._ops:OpOverloadPacket")
_higher_order_operator = AnyClass("torch._ops:HigherOrderOperator")
_operator_namespace = AnyClass("torch._ops:_OpNamespace")
_higher_order = Internal[dict[str, object]]("torch._ops:_higher_order_ops")
#: Whether graphs that call a higher-order operator may be cached: torch's checks ask the operator.
operator_cacheable = Predicate("torch._ops:HigherOrderOperator.cacheable")
#: What Dynamo makes of a call of a custom ``autograd.Function``.
custom_function = AnyObject("torch._functorch.autograd_function:autograd_function_apply")
_is_opaque = Predicate("torch._library.opaque_object:is_opaque_type")
#: What Inductor uses in place of sets.
ordered_set = Internal[type[Collection[object]]]("torch.utils._ordered_set:OrderedSet")
Fields("torch._ops:OpOverload", Operator)
Fields("torch._ops:OpOverloadPacket", "overloads")


def is_operator(value: object) -> bool:
    """Return whether ``value`` is an operator, an overload of one, or of higher order."""
    return not _kinds_of_operators().isdisjoint(type(value).__mro__)


@functools.cache
def _kinds_of_operators() -> frozenset[type]:
    return frozenset((operator.get(), operator_packet.get(), _higher_order_operator.get()))


# Not by ``isinstance``: one class is abstract, which asks all of its subclasses, 3 ms in all.
def is_higher_order(value: object) -> bool:
    """Return whether ``value`` is an operator of higher order."""
    return _higher_order_operator.get() in type(value).__mro__


@functools.cache
def is_kind_of_namespace(kind: type) -> bool:
    """Return whether such objects find operators by their names, as ``torch.ops.aten`` does."""
    return _operator_namespace.get() in kind.__mro__


@functools.cache
def is_kind_of_packet(kind: type) -> bool:
    """Return whether such objects hold the overloads of an operator."""
    return operator_packet.get() in kind.__mro__


@functools.cache
def is_kind_of_operator(kind: type) -> bool:
    """Return whether such objects are overloads of operators, or of higher order."""
    return not {operator.get(), _higher_order_operator.get()}.isdisjoint(kind.__mro__)


def higher_order_operators() -> dict[str, object]:
    """Return the higher-order operators that were made so far, by name."""
    return _higher_order.get()


def full_name(value: object) -> str:
    """Return the dispatcher's name of a namespace, packet or operator."""
    if isinstance(value, _operator_namespace.get()):
        return str(value.name)
    if isinstance(value, operator_packet.get()):
        return str(value._qualified_op_name)
    return cast("Operator", value).name()


def full_name_there(home: Mapping[str, object], name: str) -> str:
    """Return the same for what torch keeps under ``name`` in the object with that ``__dict__``."""
    packet, space = home.get("_qualified_op_name"), home.get("name")
    if isinstance(packet, str):
        return packet if name == "default" else f"{packet}.{name}"
    return f"{space}::{name}" if isinstance(space, str) else name


def is_place_of_overload(home: Mapping[str, object], name: str) -> bool:
    """Return whether torch keeps an overload of an operator under ``name`` in that packet."""
    overloads = home.get("_overload_names", ())
    return ("" if name == "default" else name) in cast("Collection[str]", overloads)


def is_place_of_packet(home: Mapping[str, object], name: str) -> bool:
    """Return whether torch keeps an operator under ``name`` in that namespace."""
    if name in _what_namespaces_have():
        return False
    return DEFINED_AT.search(dispatch_dump.get()(full_name_there(home, name))) is not None


@functools.cache
def _what_namespaces_have() -> frozenset[str]:
    return frozenset(vars(_operator_namespace.get()("s3cache")))


def tables_of(values: Sequence[Operator]) -> list[dict[object, object]]:
    """Return what each does in Python: by key, by class of tensors or modes, and by transform."""
    tables = ((each.py_kernels, each.python_key_table, each.functorch_table) for each in values)
    return [table for three in tables for table in three]


def packet_of(function: object) -> object:
    """Return the operator that ``function`` is an overload of; ``None`` if it is none."""
    return getattr(function, "overloadpacket", None)


def inside_of_ordered_set(value: Collection[object]) -> dict[object, None]:
    """Return the dictionary that it is made of: its keys are what is in it."""
    return cast("dict[object, None]", value._dict)  # type: ignore[attr-defined]


def is_dtype(value: object) -> bool:
    """Return whether it is the type of the elements of a tensor."""
    import torch

    return isinstance(value, torch.dtype)


def is_opaque_type(kind: type) -> bool:
    """Return whether graphs hold objects of this class of the user's as they are."""
    return _is_opaque.get()(kind)


# -- what is registered for operators

# How the dispatcher writes the key and the source file of each kernel of an operator, and its own.
REGISTERED_AT = re.compile(r"^(\S+): registered at (.+?):\d+ ", re.MULTILINE)
DEFINED_AT = re.compile(r"^debug: registered at (.+?):\d+$", re.MULTILINE)


def _says_where(dump: Callable[[str], str]) -> bool:
    text = dump("aten::relu")
    return REGISTERED_AT.search(text) is not None and DEFINED_AT.search(text) is not None


dispatch_dump = Internal[Callable[[str], str]]("torch._C:_dispatch_dump", works=_says_where)
custom_operators = Internal[Mapping[str, Any]]("torch._library.custom_ops:OPDEFS")
fake_registry = Internal[Mapping[str, Any]]("torch._library.simple_registry:singleton._data")
register_kernel = Internal[Function[object]]("torch.library:Library.impl")
_python_kernels = Internal[set[str]]("torch.library:_impls")
Fields(
    "torch._library.custom_ops:CustomOpDef",
    """_init_fn _opoverload _torch_dispatch_fns _abstract_fn _backward_fn _setup_context_fn _vmap_fn
    _autocast_dtype""",
    added={"_autocast_dtype": (2, 13)},
)
Fields("torch._library.simple_registry:SimpleOperatorEntry", "fake_impl torch_dispatch_rules")
Fields("torch._library.fake_impl:FakeImplHolder", "kernel")
Fields("torch._library.utils:Kernel", "func")


def autocast_dtypes(definition: object) -> Mapping[str, object]:
    """Return to what a custom operator has its inputs cast under autocast, by type of device."""
    if installed_release() >= (2, 13):
        found = attrgetter("_autocast_dtype")(definition)
    else:
        found = {name: getattr(definition, f"_autocast_{name}_dtype") for name in ("cpu", "cuda")}
    return {name: dtype for name, dtype in found.items() if dtype is not None}


def registered_kernel(
    library: Any, op_name: object, fn: object, dispatch_key: object = "", **_: object
) -> tuple[str, object]:
    """Return what a call of :data:`register_kernel` registers, after its operator and key."""
    whole = op_name if isinstance(op_name, str) else cast("Operator", op_name).name()
    name = whole.rpartition("::")[2]
    return f"{library.ns}/{name}/{dispatch_key or library.dispatch_key}", fn


def python_kernels() -> set[str]:
    """Return operators and keys with a kernel in Python, as ``aten/silu/AutogradCPU``."""
    return _python_kernels.get()


@functools.cache
def built_in() -> str:
    """Return the directory that torch's own C++ was built in; ``""`` if that is not known."""
    defined = DEFINED_AT.search(dispatch_dump.get()("aten::relu"))
    root, found, _ = (defined[1] if defined else "").partition("build/aten/")
    return root if found else ""


def sharding_rules(kind: type) -> list[tuple[object, object]]:
    """Return how operators work on distributed tensors of this class, by operator."""
    dispatcher = getattr(kind, "_op_dispatcher", None)
    propagator = getattr(dispatcher, "sharding_propagator", None)
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    rules = [rule for table in tables for rule in getattr(propagator, table, {}).items()]
    return rules + sharding_handlers(kind)


def sharding_handlers(kind: type) -> list[tuple[object, object]]:
    """Return which operators on them are not done by rules; torch changes some at times."""
    dispatcher = getattr(kind, "_op_dispatcher", None)
    return list(getattr(dispatcher, "_custom_op_handlers", {}).items())
