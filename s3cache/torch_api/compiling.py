"""torch's internals of a compile: keys, entries, sizes and guards, profiles, traces and jobs."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final, cast

from s3cache.torch_api import Internal, installed_release, names
from s3cache.torch_api.registries import torch_directory

if TYPE_CHECKING:
    from torch import device
    from torch.fx import Graph, GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import (
        AOTConfig,
        CachingAutotuner,
        Function,
        KeyDetails,
        KeyPickler,
        Reducer,
        TracingContext,
    )


# -- keys of whole graphs


def may_have_cpu_code(details: KeyDetails) -> bool:
    """Return whether torch may generate code for the processor; always False before torch 2.13."""
    ask = getattr(details, names.ASKS_FOR_CPU_CODE, None)
    return ask is not None and bool(ask(details.gm, details.example_inputs))


def graph_module_of(mod: Module) -> GraphModule:
    """Return the graph that torch looks up, unwrapped."""
    return cast("GraphModule", getattr(mod, "gm", mod))


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


def inherited_reducer(pickler: KeyPickler) -> Reducer:
    """Return the pickler's own reducer."""
    return getattr(pickler, "reducer_override", _refuse_nested)


def _refuse_nested(value: object) -> object:
    """Refuse nested tensors like later releases; a table of reducers treats them as plain."""
    import torch

    if isinstance(value, torch.Tensor) and value.is_nested:
        raise TypeError("a nested tensor has sizes that are numbered by order of creation")
    return NotImplemented


def is_numbered_length(size: object) -> bool:
    """Return whether a size is the length of a jagged dimension, numbered in this process."""
    import torch

    return isinstance(size, torch.SymInt) and size.node.nested_int() is not None


def line_for_global() -> Callable[[str, object], str] | None:
    """Return torch's function that formats a global of generated code in keys, if it exists."""
    return None if names.enrich_profiler_metadata.get() else names.format_global.find()


def has_plain_codegen(graph: Graph) -> bool:
    """Return whether the code of a graph is generated from its nodes alone."""
    codegen = graph._codegen
    return type(codegen) is names.codegen.get() and codegen._body_transformer is None


@functools.cache
def plain_arguments() -> tuple[frozenset[type], frozenset[type]]:
    """Return types of arguments that generated code writes as ``repr``, and of containers."""
    import torch
    from torch.fx import Node, immutable_collections

    constants = (type(None), bool, int, float, complex, str, type(...))
    of_torch = (torch.dtype, torch.device, torch.layout, torch.memory_format, Node)
    lists = (tuple, list, immutable_collections.immutable_list)
    dicts = (dict, immutable_collections.immutable_dict)
    return frozenset((*constants, *of_torch)), frozenset((*lists, *dicts))


def without_backend_id(aot_config: AOTConfig) -> AOTConfig:
    """Return the configuration without an id that is random (``caching_precompile``)."""
    if aot_config.precompile_backend_id is None:
        return aot_config
    return dataclasses.replace(aot_config, precompile_backend_id=None)


_keying = threading.local()


@contextlib.contextmanager
def skip_backend_init() -> Iterator[None]:
    """Make :func:`skips_backend_init` true in this thread while the block runs.

    Importing all of torch's backends takes longer than a key, and a hit needs none.
    """
    before, _keying.unasked = getattr(_keying, "unasked", False), True
    try:
        yield
    finally:
        _keying.unasked = before


def skips_backend_init() -> bool:
    """Return whether backends need not be registered now; custom devices must be."""
    return getattr(_keying, "unasked", False) and names.added_device.get()() == "privateuseone"


# -- keys of FX graphs


def fx_key() -> Internal[Callable[[KeyPickler, object], str]]:
    """Return the function that makes an FX key from details; until 2.12 without the prefix."""
    return names.fx_get_key if names.fx_get_key.expected else names.fx_get_hash


def asks_fx_cache() -> bool:
    """Return whether Inductor uses its cache of FX graphs, according to options."""
    local = names.inductor_config.get().fx_graph_cache
    return bool(local) or names.should_use_remote_fx_cache.get()()


# -- entries


def as_load_result(function: Function[object], aot_config: AOTConfig) -> object:
    """Return the result of ``try_load`` for a hit: with the configuration since torch 2.13."""
    return (function, aot_config) if installed_release() >= (2, 13) else function


def is_hit(result: object) -> bool:
    return (result[0] if isinstance(result, tuple) else result) is not None


def boxed(function: Callable[[list[object]], object]) -> Callable[[list[object]], object]:
    """Mark ``function`` as taking its arguments as a list, which it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def hide(function: Function[object]) -> None:
    """Make Dynamo trace neither a function, a plain one, nor what it calls.

    torch calls our hooks while a compiled program runs: it lowers most backwards then. Dynamo would
    trace them like functions of the program.
    """
    skip = names.frame_action.get().SKIP
    names.set_strategy.get()(function.__code__, names.frame_strategy.get()(skip, skip))


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


def code_in_dynamo() -> CodeType | None:
    """Return the code of the frame that Dynamo traces now, if any."""
    if "torch._dynamo.symbolic_convert" not in sys.modules:
        return None
    translator = getattr(names.translating.get(), names.TRANSLATOR, None)
    return cast("CodeType | None", getattr(translator, "f_code", None))


def inner_compiler(compiler: object) -> object:
    """Return the function inside ``compiler`` that lowers, if Inductor made it; else ``None``.

    Inductor makes one for each graph, around the function of its caller.
    """
    function: object = getattr(compiler, "compiler_fn", None)
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, FunctionType) or function.__code__.co_name != "fw_compiler_base":
        return None
    if not function.__code__.co_filename.startswith(torch_directory()):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cell = cells.get("inner_compile")
    return None if cell is None else cell.cell_contents


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


def name_of_source(source: Any) -> str | None:
    """Return the source of an input as a Python expression; ``None`` if it is not known."""
    try:
        return str(source.name() if callable(source.name) else source.name)
    except Exception:  # noqa: BLE001 - some have no such thing, and say so in their own ways
        return None


def known_of_sizes(gm: GraphModule, inputs: Sequence[object]) -> str:
    """Return what the current compile knows of the symbols in a graph, and of related symbols.

    That is all that torch can use from now on when it reasons about sizes, in the form in which
    torch checks it: guards, ranges, equalities, divisibility, assertions, specializations. Values
    of symbols are not part of it, nor is knowledge of other variables of the program.
    """
    context = names.current_tracing_context.get()()
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    if shapes is None or not shapes.var_to_range:
        return ""
    related: set[Any] = _symbols_of_graph(gm, inputs)
    if not related:
        return ""
    asserts = [each.expr for some in shapes.deferred_runtime_asserts.values() for each in some]
    facts = [(f"{each}", each.free_symbols) for each in shapes.get_nontrivial_guards()]
    facts += [(f"assert {each}", each.free_symbols) for each in map(shapes.simplify, asserts)]
    facts += [(f"{each} = 0", each.free_symbols) for each in map(shapes.replace, shapes.divisible)]
    for symbol, other in {**shapes.replacements, **shapes.unbacked_renamings}.items():
        facts.append((f"{symbol} = {shapes.replace(other)}", {symbol, *other.free_symbols}))
    if getattr(shapes, "specializations", None):  # the one that is compiled now is an axiom only
        facts += [
            (f"{each} is {known}", each.free_symbols) for each, known in shapes.axioms.items()
        ]
    found: set[str] = set()
    while some := [each for each in facts if not related.isdisjoint(each[1])]:
        facts = [each for each in facts if related.isdisjoint(each[1])]
        related = related.union(*(symbols for _, symbols in some))
        found |= {text for text, _ in some}
    for symbol in related & shapes.var_to_range.keys():
        bounds, size = shapes.var_to_range[symbol], symbol in shapes.size_like
        found.add(f"{symbol} in [{bounds.lower}, {bounds.upper}]{' as a size' if size else ''}")
    if found and shapes.prefer_deferred_runtime_asserts_over_guards:
        found.add("deferred")
    return "; ".join(sorted(found))


def _symbols_of_graph(gm: GraphModule, inputs: Sequence[object]) -> set[Any]:
    """Return the symbols in the inputs of a graph, and those that its nodes introduce."""
    import torch

    symbols: set[Any] = set()
    for value in inputs:
        for number in _numbers_of(value):
            if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                symbols |= getattr(getattr(number.node, "expr", None), "free_symbols", set())
    for module in gm.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            symbols |= (node.meta.get(names.NEW_SYMBOLS) or {}).keys()
    return symbols


def _numbers_of(value: Any) -> Iterator[object]:
    """Yield the numbers that describe an input: its layout, and that of all tensors inside."""
    import torch

    if not isinstance(value, torch.Tensor):
        yield value
        return
    yield from value.shape
    if value.layout is torch.strided:
        yield from (*value.stride(), value.storage_offset())
    if (flatten := getattr(value, "__tensor_flatten__", None)) is not None:
        for name in flatten()[0]:
            yield from _numbers_of(getattr(value, name))


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

    return {
        "min": lambda *sizes: functools.reduce(torch.sym_min, sizes),
        "max": lambda *sizes: functools.reduce(torch.sym_max, sizes),
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


# -- Dynamo: graph breaks, automatic dynamic shapes, traces


def describe_break(reason: Any) -> dict[str, str]:
    """Return in one line why Dynamo ended a graph, and the place in the user's program."""
    stack = reason.user_stack
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
    return {"reason": reason.reason.strip().partition("\n")[0], "where": where}


@contextlib.contextmanager
def trace_event(event: str, level: str) -> Iterator[dict[str, object]]:
    """Show the block as an event in torch's own traces, with the content of the mapping.

    It appears in ``TORCH_TRACE`` and in a profiler's trace. Nested events with the same name are
    left out, and so are events that fail.
    """
    about: dict[str, object] = {"level": level}
    began_ns, end = time.time_ns(), None
    with contextlib.suppress(Exception):
        if names.trace_log.get().handlers or names.profiler_runs.get():
            log = names.event_log.get()()
            if event not in log.get_stack():
                log.log_event_start(event, began_ns, {}, False)
                end = log.log_event_end
    try:
        yield about
    finally:
        if end is not None:
            with contextlib.suppress(Exception):
                end(event, time.time_ns(), about, began_ns, False)


# -- processes of a job, and first calls on fake tensors (DDPOptimizer)


def hits_need_agreement() -> bool:
    """Return whether processes must agree on hits: they exchange data while they compile.

    False if torch's own lookups already make them agree.
    """
    return not names.sync_lookups.find() and compiles_exchange()


def compiles_exchange() -> bool:
    """Return whether processes of this job exchange data while they compile, hits or not."""
    if not any(option.get() for option in names.EXCHANGING):
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


#: Namespaces of operators with which processes exchange data.
COLLECTIVES = frozenset(
    {
        *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
        *("_dtensor", "symm_mem"),
    }
)


_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)


def without_comments(source: str) -> str:
    """Return generated code without the lines that are comments."""
    return _COMMENT.sub("", source)


def collectives_of(source: str) -> Counter[str]:
    """Return how often generated code calls each collective."""
    code = without_comments(source)
    return counted_collectives(re.findall(r"\btorch\.ops\.(\w+)\.(\w+)(?:\.\w+)?\(", code))


def counted_collectives(operators: Iterable[tuple[str, str]]) -> Counter[str]:
    """Count the collectives among operators, given by namespace and name."""
    # Variants that write into the input or into a buffer count as the same collective.
    found = (
        name.removesuffix("_out").removesuffix("_")
        for namespace, name in operators
        if namespace in COLLECTIVES
    )
    return Counter(name for name in found if not name.startswith("wait_tensor"))


def is_in_job() -> bool:
    """Return whether this process is one of several that have joined in a job."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def process_groups() -> tuple[int, int, object] | None:
    """Return the number of this process, of all, and the groups by name; None outside of a job."""
    if not is_in_job():
        return None
    import torch.distributed as dist

    world = names.groups.get()
    groups = sorted((name, sorted(world.pg_group_ranks[g])) for g, name in world.pg_names.items())
    return dist.get_rank(), dist.get_world_size(), groups


def copied(module: GraphModule) -> GraphModule:
    """Copy a graph, for a compiler that changes it."""
    with names.without_fakes.get()():  # which cannot be copied into a mode of their own
        return copy.deepcopy(module)


def _context_of_fake_call() -> TracingContext | None:
    context = names.current_tracing_context.get()()
    return context if context is not None and context.fakify_first_call else None


def is_first_call_fake() -> bool:
    """Return whether the current graph answers its first call with fake tensors."""
    return _context_of_fake_call() is not None


@contextlib.contextmanager
def hide_fake_first_call() -> Iterator[None]:
    """Hide from torch, in the block, that first calls will be on fake tensors."""
    context = _context_of_fake_call()
    if context is not None:
        context.fakify_first_call = False
    try:
        yield
    finally:
        if context is not None:
            context.fakify_first_call = True


def stand_in_for_metadata() -> None:
    """Provide metadata for a graph that is not compiled: DDPOptimizer requires it."""
    context = _context_of_fake_call()
    if context is not None and context.fw_metadata is None:
        context.fw_metadata = object()


# -- rebuilding a graph without importing Inductor's lowerings
#
# Generated code imports two names from those modules, which few graphs use: we look them up at
# their first use. torch itself uses one class there, to show code to tests.

#: Lines of generated code, and their replacements.
_LINES: Final = {
    f"from {names.SELECTION} import extern_kernels\n": "extern_kernels = _s3cache_kernels\n",
    f"from {names.PLANNING} import _align as align\n": "align = _s3cache_align\n",
}
#: Kernels that are functions of torch with the same name.
SAME_NAME: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_int_mm"})


def with_filename(code: CodeType, path: str) -> CodeType:
    """Return code, and its nested code, with another file name."""
    if code.co_filename == path:
        return code
    constants = tuple(
        with_filename(each, path) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    return code.replace(co_consts=constants, co_filename=path)


class LateKernels:
    """A stand-in for ``extern_kernels``; imports Inductor for kernels that torch does not have."""

    def __getattr__(self, name: str) -> object:
        import torch

        if name in SAME_NAME and names.SELECTION not in sys.modules:
            found: object = getattr(torch, name)
        else:
            found = getattr(names.selected_kernels.get(), name)
        vars(self)[name] = found
        return found


def late_align(nbytes: object) -> object:
    """Compute the same as Inductor's own function, without its imports."""
    aligned: object = names.align.get()(nbytes)
    return aligned


def strip_imports(source: str) -> tuple[str, dict[str, object]]:
    """Return generated code with fewer imports, and the names that it needs instead."""
    for line, shorter in _LINES.items():
        source = source.replace(line, shorter, 1)
    return source, {"_s3cache_kernels": LateKernels(), "_s3cache_align": late_align}
