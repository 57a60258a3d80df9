"""torch as some graphs need it: sizes and guards, devices, jobs, custom operators."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

from s3cache.torch_api import installed_release, names
from s3cache.torch_api.lookups import graph_module_of, is_in_job, name_of_source

if TYPE_CHECKING:
    from torch import device
    from torch.fx import GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import (
        AOTConfig,
        CachingAutotuner,
        Function,
        Operator,
        TracingContext,
    )


# -- keys and entries


def name_of_key(
    mod: Module, args: Sequence[object], aot_config: AOTConfig, others: Sequence[object]
) -> str:
    """Return the key that ``try_load`` would look up with these arguments, or raise its error."""
    ask, release = names.autograd_cache_key.get(), installed_release()
    if release >= (2, 14):  # compiler configuration; paths of offloaded activations
        return ask(mod, args, aot_config, others[0], *others[3:4])[0]
    if release >= (2, 12):
        return ask(mod, args, aot_config, others[0])[0]
    gm = graph_module_of(mod)
    options = {"cudagraphs": others[0], "boxed_forward_device_index": others[1]}
    with names.sanitized.get()(gm):
        return ask(gm, args, aot_config, options)[0]


def as_load_result(function: Function[object], aot_config: AOTConfig) -> object:
    """Return the result of ``try_load`` for a hit: with the configuration since torch 2.13."""
    return (function, aot_config) if installed_release() >= (2, 13) else function


def skip_package(name: str) -> Callable[[], None]:
    """Make Dynamo trace no function of a package; return a function that ends this."""
    directories, before = names.skipped_directories.get(), [*names.skipped_directories.get()]
    names.add_skipped.get()(name)
    added = [each for each in directories if each not in before]

    def end() -> None:
        for directory in added:
            directories.remove(directory)
        names.apply_skipped.get()()

    return end


def is_loaded(kernel: CachingAutotuner) -> bool:
    """Return whether a kernel is on the device; torch bundles unloaded copies."""
    results = [result.kernel for result in kernel.compile_results]
    return any(getattr(result, names.ON_DEVICE, None) is not None for result in results)


def triton_environment() -> dict[str, str]:
    """Return the variables in Triton's own key that are set; none without Triton."""
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
    except ImportError:
        return {}
    return dict(get_cache_invalidating_env_vars())


# -- devices

# Properties that differ between equal devices.
_IDENTITY = frozenset({"pci_bus_id", "pci_device_id", "pci_domain_id", "uuid"})


def current_device(kind: str) -> device:
    """Return the current device of a kind, such as ``cuda``."""
    import torch

    return torch.device(kind, torch.get_device_module(kind).current_device())


def device_properties(device: device) -> dict[str, object]:
    """Return torch's properties of a device, and the version of CUDA that its driver supports."""
    import torch

    properties = torch.get_device_module(device).get_device_properties(device)
    values = {n: getattr(properties, n) for n in dir(properties) if not n.startswith("_")}
    if "uuid" in values:
        values["uuid"] = str(values["uuid"])
    fields = {n: value for n, value in values.items() if isinstance(value, (int, float, str))}
    return {**fields, "driver": _cuda_driver() if device.type == "cuda" else ""}


def shared_properties(device: device) -> dict[str, object]:
    """Return the properties of a device that equal devices share, besides the size of memory."""
    return {n: value for n, value in device_properties(device).items() if n not in _IDENTITY}


@functools.cache
def _cuda_driver() -> int:
    """Return the version of CUDA that the driver supports, or 0; torch has no function for it."""
    version = ctypes.c_int()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


# -- sizes, and guards on them


def shape_guards(context: TracingContext) -> Sequence[Any]:
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    return () if shapes is None else cast("Sequence[Any]", shapes.guards)


def named_symbols(context: TracingContext, symbols: Iterable[object]) -> dict[str, str] | None:
    """Return the source of each symbol; ``None`` if one is not known."""
    known = context.fake_mode.shape_env.var_to_sources
    named = {str(each): name_of_source(next(iter(known.get(each) or ()), None)) for each in symbols}
    return None if None in named.values() else cast("dict[str, str]", named)


def are_named(context: TracingContext, named: Mapping[str, str]) -> bool:
    """Return whether symbols with these names have these sources in the current compile."""
    symbols = context.fake_mode.shape_env.var_to_sources
    return named_symbols(context, [each for each in symbols if str(each) in named]) == {**named}


def value_of_symbol(context: TracingContext, expression: str) -> int | float | bool:
    """Evaluate an expression of symbols with the sizes of the current compile.

    It adds no guard (torch's own function does, until 2.14).
    """
    sizes = context.fake_mode.shape_env.backed_var_to_val
    values = {str(symbol): size for symbol, size in sizes.items()}
    functions = names.guard_functions.get()
    # The text was printed by torch and is from a verified entry; torch evaluates it in this way.
    return cast("int | float | bool", eval(expression, functions, values))  # noqa: S307


def branch_free() -> dict[str, object]:
    """Return ``min`` and ``max`` for guards on sizes that do not branch.

    Python's own would add a guard on the branch: then calls that fit a hit would be recompiled.
    """
    import torch

    def choose(symbolic: Function[object], plain: Function[object], *sizes: object) -> object:
        # torch also calls them with numbers of SymPy, which its symbolic functions refuse.
        is_symbolic = any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in sizes)
        return functools.reduce(symbolic, sizes) if is_symbolic else plain(*sizes)

    return {
        "min": functools.partial(choose, torch.sym_min, min),
        "max": functools.partial(choose, torch.sym_max, max),
    }


def guard_on_sizes(context: TracingContext, expression: str) -> None:
    """Add a guard that must hold for the sizes of the current compile."""
    shape_env, functions = context.fake_mode.shape_env, names.guard_functions.get()
    # torch's own function cannot make a number of the length of a jagged dimension.
    sizes = {
        str(symbol): shape_env.create_symintnode(symbol, hint=int(value))
        for symbol, value in shape_env.backed_var_to_val.items()
        if str(symbol) in compile(expression, "", "eval").co_names
    }
    if not eval(expression, functions, sizes):  # noqa: S307 - see value_of_symbol
        raise ValueError(f"{expression} does not hold")


def format_expression(expression: object) -> str:
    """Format an expression over sizes for ``ShapeEnv.deserialize_symexpr``."""
    return str(names.expression_printer.get()().doprint(expression))


# -- guards on inputs that AOTAutograd adds while it compiles, and Dynamo checks


def sources_of_guard(guard: object) -> tuple[str, list[object], list[object]] | None:
    """Return the kind and inputs of a guard by AOTAutograd; ``None`` for another kind."""
    kind, fields = type(guard).__name__, getattr(guard, "__dict__", {})
    if type(guard) is names.duplicate_inputs.get():
        return kind, [fields["input_source_a"]], [fields["input_source_b"]]
    if type(guard) is names.storage_overlap.get():
        return kind, [*fields["overlapping_sources"]], [*fields["non_overlapping_sources"]]
    return None


def guard_holds(
    context: TracingContext, kind: str, some: Sequence[object], others: Sequence[object]
) -> bool:
    """Return whether a guard on these inputs holds, without adding a guard."""
    if kind == "DuplicateInputs":
        return some[0] is others[0]
    with context.fake_mode.shape_env.suppress_guards():
        found = names.overlapping.get()([*some, *others], symbolic=True)
    return bool(found == set(range(len(some))))


def guard_on(kind: str, some: list[object], others: list[object]) -> object:
    """Make a guard, the inverse of :func:`sources_of_guard`; raise ``ValueError`` if it is none."""
    if kind == "DuplicateInputs" and len(some) == len(others) == 1:
        return names.duplicate_inputs.get()(some[0], others[0])
    if kind == "StorageOverlap":
        return names.storage_overlap.get()(some, others)
    raise ValueError(f"no guard is a {kind} on {len(some)} and {len(others)} inputs")


def describe_break(reason: Any) -> dict[str, str]:
    """Return in one line why Dynamo ended a graph, and the place in the user's program."""
    stack = reason.user_stack
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
    return {"reason": reason.reason.strip().partition("\n")[0], "where": where}


# -- processes of a job

#: Namespaces of operators with which processes exchange data.
COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}
COLLECTIVES |= {"_dtensor", "symm_mem"}


def without_comments(source: str) -> str:
    """Return generated code without the lines that are comments."""
    return re.sub(r"^\s*#.*$", "", source, flags=re.MULTILINE)


def collectives_of(source: str) -> Counter[str]:
    """Return how often generated code calls each collective."""
    code = without_comments(source)
    return counted_collectives(re.findall(r"\btorch\.ops\.(\w+)\.(\w+)(?:\.\w+)?\(", code))


def counted_collectives(operators: Iterable[tuple[str, str]]) -> Counter[str]:
    """Count the collectives among operators, given by namespace and name."""
    # Variants that write into the input or into a buffer count as the same collective.
    collectives = (
        name.removesuffix("_out").removesuffix("_")
        for namespace, name in operators
        if namespace in COLLECTIVES
    )
    return Counter(name for name in collectives if not name.startswith("wait_tensor"))


def process_groups() -> tuple[int, int, object] | None:
    """Return the number of this process, of all, and the groups by name; None outside of a job."""
    import torch.distributed as dist

    if not is_in_job():
        return None
    world = names.groups.get()
    groups = sorted((name, sorted(world.pg_group_ranks[g])) for g, name in world.pg_names.items())
    return dist.get_rank(), dist.get_world_size(), groups


def copy_graph(module: GraphModule) -> GraphModule:
    """Copy a graph, for a compiler that changes it."""
    with names.without_fakes.get()():  # which cannot be copied into a mode of their own
        return copy.deepcopy(module)


# -- operators, patterns and backends

#: The table of functions that are called in place of operators on fake tensors.
FAKE_RULES = "torch._subclasses.fake_impls.op_implementations_dict"


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


def autocast_dtypes(definition: Any) -> Mapping[str, object]:
    """Return the dtypes to which autocast casts inputs of a custom operator, by device type."""
    if installed_release() >= (2, 13):
        dtypes = definition._autocast_dtype
    else:
        dtypes = {name: getattr(definition, f"_autocast_{name}_dtype") for name in ("cpu", "cuda")}
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


def sharding_rules(kind: type) -> list[tuple[object, object]]:
    """Return the rules of operators on distributed tensors of this class, by operator."""
    propagator = getattr(getattr(kind, "_op_dispatcher", None), "sharding_propagator", None)
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    rules = [rule for table in tables for rule in getattr(propagator, table, {}).items()]
    return rules + sharding_handlers(kind)


def sharding_handlers(kind: type) -> list[tuple[object, object]]:
    """Return the handlers of operators without rules; torch changes some of them at run time."""
    dispatcher = getattr(kind, "_op_dispatcher", None)
    return list(getattr(dispatcher, "_custom_op_handlers", {}).items())


@functools.cache
def generated_operations() -> frozenset[FunctionType]:
    """Return functions that Inductor makes from text, so that their code is in no file."""
    values = vars(names.default_handler.get()).values()
    return frozenset(value for value in values if isinstance(value, FunctionType))


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
