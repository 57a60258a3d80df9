"""torch's options, operators and passes, and what programs set and register there."""

from __future__ import annotations

import builtins
import functools
import itertools
import operator as operators
import os
import sys
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from s3cache.torch_api import installed_release, names

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import Config, Function, Operator

# -- options


class Asked(NamedTuple):
    """Which tiers torch's options allow a level of the cache to use."""

    local: bool
    remote: bool


def tiers_asked(level: str) -> Asked:
    """Return the tiers that torch's options allow for ``level``, ``aot`` or ``fx``.

    An option for the remote cache that is not set follows the one for the local cache.
    """
    functorch, inductor = names.functorch_config.get(), names.inductor_config.get()
    local, remote = (
        (functorch.enable_autograd_cache, functorch.enable_remote_autograd_cache)
        if level == "aot"
        else (inductor.fx_graph_cache, inductor.fx_graph_remote_cache)
    )
    if names.force_disable_caches.get():
        local = remote = False
    return Asked(local, local if remote is None else remote)


def options_text(config: Config) -> str | None:
    """Return the options of a config module that affect compiled code, as text.

    None if one of them has no text that is equal in other processes, such as a pass.
    """
    values: dict[str, object] = config.get_config_copy()
    ignored = tuple(cast("list[str]", values.get("_cache_config_ignore_prefix", [])))
    # Directories do not affect compiled code.
    unused = {"base_dir", "debug_dir_root", *itertools.chain(*names.CACHING_OPTIONS)}
    texts: list[str] = []
    for name, value in sorted(values.items()):
        if name in unused or name.startswith((*ignored, "_save_config", "_cache_config")):
            continue
        text = _plain_text(value)
        if text is None:
            return None
        texts.append(f"{name}={text}")
    return "\n".join(texts)


def _plain_text(value: object) -> str | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    items: Collection[object]
    if isinstance(value, dict):
        items = [each for pair in value.items() for each in pair]
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    else:
        return None
    texts = [_plain_text(each) for each in items]
    if None in texts:
        return None
    if isinstance(value, (set, frozenset)):
        texts.sort(key=str)
    return f"{type(value).__name__} {texts}"


def read_quietly(owner: object, name: str, *default: object) -> object:
    """Return the result of ``getattr``, without torch's deprecation warnings.

    Only deprecated options and attributes from a module's ``__getattr__`` warn. Read others
    directly: changing the filters makes Python repeat warnings that it shows once.
    """
    found = vars(owner) if isinstance(owner, ModuleType) else {}
    option = (found.get("_config") or {}).get(name)
    warns = option is None or getattr(option, "deprecated", False)
    if not isinstance(owner, ModuleType) or name in found or not warns:
        return getattr(owner, name, *default)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(owner, name, *default)


# -- torch's own code


@functools.cache
def torch_directory() -> str:
    """Return the directory of torch, with a separator at the end. Imports torch."""
    import torch

    return os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def is_kept_from_dynamo(function: object, inner: object) -> bool:
    """Return whether ``function`` only hides ``inner`` from Dynamo.

    torch wraps ``torch.manual_seed`` in this way when Dynamo is imported.
    """
    if not isinstance(function, FunctionType):
        return False
    codes = names.disable_from_compile.get().__code__.co_consts
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__ in codes and any(content is inner for content in cells)


def name_of(function: object) -> str:
    """Return the name of a function or custom operator in torch's check."""
    function = getattr(function, "_opoverload", function)  # of torch.library.custom_op
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '<none>')}"


def name_in_code(function: object) -> str | None:
    """Return the name of a function or class of torch or Python in generated code, or None."""
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
    return names.qualified_name.get()(function) if names.is_from_torch.get()(function) else None


#: A class into which torch puts the code of every graph that it loads.
EXCHANGED = "torch.fx.graph_module._CodeOnlyModule"


# -- namespaces and tables

#: Namespaces in which programs may replace functions, besides ``IMPORT_POINTS``: those
#: that are imported with the compiler.
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
#: Names that are not used during a compile; programs often replace them.
NOT_COMPILED = frozenset(
    """
    __deepcopy__ __dir__ __format__ __reduce_ex__ __repr__ __setstate__ __slotnames__ __str__
    backward compile initial_seed load manual_seed save seed set_printoptions share_memory_ typename
    """.split()  # noqa: SIM905 - one word a line would be longer
)


def contents(place: str) -> Mapping[object, object] | None:
    """Return the current content of a namespace, class or table; ``None`` until it is imported."""
    module, _, name = place.partition(":")
    found: Any = sys.modules.get(module)
    if name:
        found = getattr(found, name, None)
    return found if found is None or isinstance(found, dict) else vars(found)


def is_shadowed(place: str, name: str) -> bool:
    """Return whether torch would find another ``name`` if this namespace did not have it."""
    module, _, kind = place.partition(":")
    if kind:
        bases = getattr(sys.modules[module], kind).__mro__[1:]
        return any(name in vars(base) for base in bases)
    return hasattr(builtins, name) or (
        module == "torch._VF" and hasattr(names.variable_functions.get(), name)
    )


# -- operators


def is_operator(value: object) -> bool:
    """Return whether ``value`` is an operator, an overload of one, or of higher order."""
    return kind_of_operator(value) in ("higher-order", "overload", "packet")


def kind_of_operator(value: object) -> str:
    """Return ``namespace``, ``packet``, ``overload`` or ``higher-order``; ``""`` for other values.

    A namespace, such as ``torch.ops.aten``, has operators by name; a packet has the overloads of an
    operator.
    """
    return _kind_of_operator(cast("Hashable", type(value)))


# Without ``isinstance``: one class is abstract and asks all of its subclasses, 3 ms in all.
@functools.cache
def _kind_of_operator(kind: Hashable) -> str:
    kinds = {
        "higher-order": names.higher_order_operator,
        "overload": names.operator,
        "packet": names.operator_packet,
        "namespace": names.operator_namespace,
    }
    bases = cast("type", kind).__mro__
    return next((name for name, each in kinds.items() if each.get() in bases), "")


def full_name(value: object) -> str:
    """Return the dispatcher's name of a namespace, packet or operator."""
    found: Any = value
    kind = kind_of_operator(value)
    name = found.name if kind != "packet" else found._qualified_op_name
    return str(name if kind in ("namespace", "packet") else name())


def full_name_there(home: Mapping[str, object], name: str) -> str:
    """Return the full name of ``name`` in the object with the ``__dict__`` ``home``."""
    packet, space = home.get("_qualified_op_name"), home.get("name")
    if isinstance(packet, str):
        return packet if name == "default" else f"{packet}.{name}"
    return f"{space}::{name}" if isinstance(space, str) else name


def is_place_of_operator(home: Mapping[str, object], name: str) -> bool:
    """Return whether ``name`` in ``home`` is a place for an operator or an overload."""
    if "_qualified_op_name" in home:
        overloads = home.get("_overload_names", ())
        return ("" if name == "default" else name) in cast("Collection[str]", overloads)
    if "name" not in home or name in vars(names.operator_namespace.get()("s3cache")):
        return False
    text = names.dispatch_dump.get()(full_name_there(home, name))
    return names.DEFINED_AT.search(text) is not None


def tables_of(value: Operator) -> list[dict[object, object]]:
    """Return its tables of Python rules: by key, by class of tensors or modes, by transform."""
    return [value.py_kernels, value.python_key_table, value.functorch_table]


def inside_of_ordered_set(value: Collection[object]) -> dict[object, None]:
    """Return the dictionary inside an ordered set: its keys are the items."""
    return cast("dict[object, None]", value._dict)  # type: ignore[attr-defined]


def by_name(inside: Collection[object]) -> dict[object, object]:
    """Return the items of a container by key or index, or by the item itself."""
    if isinstance(inside, Mapping):
        return dict(inside)
    if isinstance(inside, (list, tuple)):
        return dict(enumerate(inside))
    if type(inside) is names.ordered_set.get():
        inside = inside_of_ordered_set(inside)  # faster than iterating over the set
    return {each: each for each in list(inside)}


def is_dtype(value: object) -> bool:
    import torch

    return isinstance(value, torch.dtype)


#: The table of functions that are called in place of operators on fake tensors.
FAKE_RULES = "torch._subclasses.fake_impls:op_implementations_dict"


def is_decomposed_first(operator: Any) -> bool:
    """Return whether an operator on fake tensors is decomposed before a rule for it is read.

    ``ExportedProgram.run_decompositions`` removes the rules of such operators.
    """
    mode = names.fake_mode.get()
    return not (
        operator in names.meta_table.get()
        or operator in mode._unbacked_special_fake_handling_ops
        or mode.cpp_meta_supports_symint(mode, operator)
    ) and bool(operator._can_decompose())


def has_flexible_layout(operator: Operator) -> bool:
    """Return True if Inductor may give inputs of a custom operator another layout than traced."""
    tags = {str(tag).rpartition(".")[2] for tag in operator.tags}
    if any(tag.startswith("needs_") for tag in tags):
        return False
    default = getattr(names.functorch_config.get(), "custom_op_default_layout_constraint", "")
    return "flexible_layout" in {*tags, default}


# -- registrations for operators


def autocast_dtypes(definition: object) -> Mapping[str, object]:
    """Return the dtypes to which autocast casts inputs of a custom operator, by device type."""
    if installed_release() >= (2, 13):
        found = attrgetter("_autocast_dtype")(definition)
    else:
        found = {name: getattr(definition, f"_autocast_{name}_dtype") for name in ("cpu", "cuda")}
    return {name: dtype for name, dtype in found.items() if dtype is not None}


def registered_kernel(
    library: Any, op_name: object, fn: object, dispatch_key: object = "", **_: object
) -> tuple[str, object]:
    """Return the operator with key, and the function, of a call of ``register_kernel``."""
    whole = op_name if isinstance(op_name, str) else cast("Operator", op_name).name()
    name = whole.rpartition("::")[2]
    return f"{library.ns}/{name}/{dispatch_key or library.dispatch_key}", fn


@functools.cache
def built_in() -> str:
    """Return the directory in which torch's own C++ was built; ``""`` if it is not known."""
    defined = names.DEFINED_AT.search(names.dispatch_dump.get()("aten::relu"))
    root, found, _ = (defined[1] if defined else "").partition("build/aten/")
    return root if found else ""


def sharding_rules(kind: type) -> list[tuple[object, object]]:
    """Return the rules of operators on distributed tensors of this class, by operator."""
    dispatcher = getattr(kind, "_op_dispatcher", None)
    propagator = getattr(dispatcher, "sharding_propagator", None)
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    rules = [rule for table in tables for rule in getattr(propagator, table, {}).items()]
    return rules + sharding_handlers(kind)


def sharding_handlers(kind: type) -> list[tuple[object, object]]:
    """Return the handlers of operators without rules; torch changes some of them at run time."""
    dispatcher = getattr(kind, "_op_dispatcher", None)
    return list(getattr(dispatcher, "_custom_op_handlers", {}).items())


# -- patterns and backends

# The types of most values in a module.
_NO_PASSES = frozenset((FunctionType, BuiltinFunctionType, ModuleType, type, str, int, bool))


def pattern_passes() -> list[tuple[str, Any]]:
    """Return the objects that hold registered patterns, by place, in imported modules."""
    if names.PATTERN_MATCHER not in sys.modules:
        return []
    return _pattern_passes(len(vars(names.pass_package.get())))


@functools.lru_cache(maxsize=1)
def _pattern_passes(_imported: int) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, Any]] = {}
    package = vars(names.pass_package.get())
    for name, module in sorted((n, m) for n, m in package.items() if type(m) is ModuleType):
        for attribute, value in list(vars(module).items()):
            if type(value) not in _NO_PASSES:
                for which, each in _passes_in(value):
                    found.setdefault(id(each), (f"{name}.{attribute}{which}", each))
    return list(found.values())


def _passes_in(value: object) -> Iterator[tuple[str, Any]]:
    kind = names.pattern_pass.get()
    if isinstance(value, kind):
        yield "", value
    elif isinstance(value, (dict, list, tuple)) and value:
        named = value if isinstance(value, dict) else dict(enumerate(value[:9]))
        if isinstance(next(iter(named.values())), kind):
            yield from ((f"[{key}]", each) for key, each in named.items())


@functools.cache
def generated_operations() -> frozenset[FunctionType]:
    """Return functions that Inductor makes from text, so that their code is in no file."""
    values = vars(names.default_handler.get()).values()
    return frozenset(value for value in values if isinstance(value, FunctionType))


def passes_by_device(passes: Sequence[object]) -> dict[str, object]:
    """Return the passes of backends in a key by device, without ``None``."""
    devices = list(names.custom_backend_passes.get())
    return {device: each for device, each in zip(devices, passes, strict=True) if each is not None}


def extern_kernels() -> set[str]:
    """Return names in ``extern_kernels`` from torch's import: variables of modules."""
    kind = names.extern_choice.get()
    return {
        str(vars(value)["name"])
        for name, module in list(sys.modules.items())
        if name.startswith("torch._inductor.")
        for value in list(vars(module).values())
        if type(value) is kind
    }


# -- decompositions


def usual_decompositions() -> Mapping[object, object]:
    """Return Inductor's default table of decompositions."""
    if names.fallback_random.get():
        return names.decompositions.get()
    return cast("Mapping[object, object]", names.decompositions_with_random.get()())


def found_late(module: str, name: str) -> Function[object] | None:
    """Return a stand-in for a function in a module that is slow to import; it imports when called.

    A compiled graph names the function that returns its decompositions, and rarely calls it. None
    for any other function, and if the module is imported.
    """
    if (module, name) == (
        names.DECOMPOSITIONS,
        "select_decomp_table",
    ) and module not in sys.modules:
        return _select_decomp_table
    return None


def _select_decomp_table() -> object:
    return names.decomposition_table.get()()


def stale_decompositions() -> tuple[Mapping[object, object], Mapping[object, object]]:
    """Return torch's table of decompositions, and what it would be now; both empty if equal.

    torch merges two tables at the first use; later additions to them are missing in the result.
    """
    if names.DECOMPOSITIONS not in sys.modules:
        return {}, {}
    memo = names.decompositions_with_random.get()
    if not memo.cache_info().currsize:
        return {}, {}
    now, fresh = memo(), {**names.decompositions.get(), **names.random_decompositions.get()}
    return ({}, {}) if now == fresh else (now, fresh)
