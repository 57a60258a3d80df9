"""What torch does in a compile: keys, entries, sizes and guards, profiles, traces and ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from s3cache.torch_api import Internal, installed_release, names
from s3cache.torch_api.registries import has_code_of_torch

if TYPE_CHECKING:
    from torch import SymInt
    from torch.fx import Graph, GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import (
        AOTConfig,
        CachingAutotuner,
        CompiledGraph,
        Function,
        KeyDetails,
        KeyPickler,
        Reducer,
        RuntimeMetadata,
        ShapeState,
        TracingContext,
    )

_R = TypeVar("_R")

# -- keys of whole graphs


def may_have_cpu_code(details: KeyDetails) -> bool:
    """Return whether torch says that it may make code for the processor; not before torch 2.13."""
    ask = getattr(details, names.ASKS_FOR_CPU_CODE, None)
    return ask is not None and bool(ask(details.gm, details.example_inputs))


def set_torch_key(value: bytes) -> None:
    """Have torch take ``value`` for the hash of its own source, unless it has computed it."""
    with contextlib.suppress(AssertionError, RuntimeError):  # the first until 2.12
        names.set_key.get()(value)


def graph_module_of(mod: Module) -> GraphModule:
    """Return the graph that torch looks up, unwrapped."""
    return cast("GraphModule", getattr(mod, "gm", mod))


def name_of_key(
    mod: Module, args: Sequence[object], aot_config: AOTConfig, others: Sequence[object]
) -> str:
    """Return what ``try_load`` with these arguments would look up, or raise what it would raise."""
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
    """Return what the pickler itself asks about each object."""
    return getattr(pickler, "reducer_override", _refuse_nested)


def _refuse_nested(value: object) -> object:
    """Refuse what later releases refuse: a table of reducers takes it for any other tensor."""
    import torch

    if isinstance(value, torch.Tensor) and value.is_nested:
        raise TypeError("a nested tensor has sizes that are numbered as they come")
    return NotImplemented


def line_for_global() -> Callable[[str, object], str] | None:
    """Return how torch's key words a global of generated code, if that can be asked."""
    return None if names.enrich_profiler_metadata.get() else names.format_global.find()


def has_plain_codegen(graph: Graph) -> bool:
    """Return whether the code of a graph is generated from its nodes and from nothing else."""
    codegen = graph._codegen
    return type(codegen) is names.codegen.get() and codegen._body_transformer is None


@functools.cache
def plain_arguments() -> tuple[frozenset[type], frozenset[type]]:
    """Return types of arguments that generated code has as their ``repr``; and of their holders."""
    import torch
    from torch.fx import Node, immutable_collections

    constants = (type(None), bool, int, float, complex, str, type(...))
    of_torch = (torch.dtype, torch.device, torch.layout, torch.memory_format, Node)
    lists = (tuple, list, immutable_collections.immutable_list)
    dicts = (dict, immutable_collections.immutable_dict)
    return frozenset((*constants, *of_torch)), frozenset((*lists, *dicts))


def without_backend_id(aot_config: AOTConfig) -> AOTConfig:
    """Return the same, less an id that is random in each process (``caching_precompile``)."""
    if aot_config.precompile_backend_id is None:
        return aot_config
    return dataclasses.replace(aot_config, precompile_backend_id=None)


_keying = threading.local()


@contextlib.contextmanager
def backends_unasked() -> Iterator[None]:
    """Have :func:`are_backends_unasked` hold in this thread while the block runs.

    To import all of torch's backends takes longer than a key, and a hit needs none.
    """
    before, _keying.unasked = getattr(_keying, "unasked", False), True
    try:
        yield
    finally:
        _keying.unasked = before


def are_backends_unasked() -> bool:
    """Return whether backends need not be registered now; one with its own device must be."""
    import torch

    if not getattr(_keying, "unasked", False):
        return False
    return bool(torch._C._get_privateuse1_backend_name() == "privateuseone")


# -- keys of FX graphs


def fx_key() -> Internal[Callable[[KeyPickler, object], str]]:
    """Return what makes the key of an FX graph of its details; until 2.12 without its prefix."""
    return names.fx_get_key if names.fx_get_key.expected else names.fx_get_hash


def without_carried(arguments: Sequence[object]) -> Sequence[object]:
    """Return arguments of ``fx_check_cacheable`` after the graph, less hooks among the inputs.

    A forward only carries those over to its backward. Until 2.12 the check gets the graph alone.
    """
    if not arguments:
        return arguments
    inputs, *others = arguments
    carried = names.backward_state.get()
    kept = [value for value in cast("Sequence[object]", inputs) if not isinstance(value, carried)]
    return [kept, *others]


def asks_fx_cache() -> bool:
    """Return whether Inductor asks its cache of FX graphs at all, as far as options tell."""
    local = names.inductor_config.get().fx_graph_cache
    return bool(local) or names.should_use_remote_fx_cache.get()()


# -- entries


def loaded(function: Function[object], aot_config: AOTConfig) -> object:
    """Return what ``try_load`` returns for a hit: with the configuration since torch 2.13."""
    return (function, aot_config) if installed_release() >= (2, 13) else function


def is_hit(result: object) -> bool:
    return (result[0] if isinstance(result, tuple) else result) is not None


def interpreted(module: GraphModule) -> Callable[[list[object]], object]:
    """Return a graph that was traced as a function that runs it operator by operator."""
    import torch

    def run(args: list[object]) -> object:
        values = list(args)
        args.clear()
        with torch.no_grad():
            return module(*values)

    return boxed(run)


def boxed(function: Callable[[list[object]], object]) -> Callable[[list[object]], object]:
    """Mark ``function`` as one that takes its arguments as a list, which it may empty."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def inner_compiler(compiler: object) -> object:
    """Return what Inductor lowers by, if it has made ``compiler`` for AOTAutograd; else ``None``.

    It makes one for each graph, around what its caller has given it.
    """
    function: object = getattr(compiler, "compiler_fn", None)
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, FunctionType) or not has_code_of_torch(function):
        return None
    if function.__code__.co_name != "fw_compiler_base":
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cell = cells.get("inner_compile")
    return None if cell is None else cell.cell_contents


def keep_launched_kernels(bundler: object) -> None:
    """Have the bundle hold every kernel that an autotuner in it launches.

    torch drops those of autotuners that had nothing to choose between.
    """
    winners: set[str] | None = getattr(bundler, names.WINNERS, None)
    if not winners:
        return
    winners.update(
        names.triton_file_name.get()(result.kernel.hash)
        for static in getattr(bundler, names.AUTOTUNERS) or ()
        for result in static.kernel.compile_results
    )


def is_loaded(kernel: CachingAutotuner) -> bool:
    """Return whether a kernel is on the device; torch bundles copies that are not."""
    results = [result.kernel for result in kernel.compile_results]
    return any(getattr(result, names.ON_DEVICE, None) is not None for result in results)


def move_kernel(kernel: CachingAutotuner, index: int) -> None:
    """Have a kernel that is not loaded yet loaded onto the device ``index``.

    One without an index is loaded onto the current device (``compile_on_one_rank``).
    """
    if kernel.device_props.index is None:
        return
    kernel.device_props = kernel.device_props._replace(index=index)
    kernel.triton_meta = {**kernel.triton_meta, "device": index}
    for result in kernel.compile_results:
        result.compile_meta = {**result.compile_meta, "device": index}


def move_boxed_index(graph: CompiledGraph, index: int) -> None:
    """Have CUDA graphs of ``graph``, if there are to be some, recorded on the device ``index``."""
    boxed = (graph.fx_kwargs or {}).get("boxed_forward_device_index")
    if boxed is not None and boxed.value is not None:
        boxed.value = index


def move_random_state(metadata: RuntimeMetadata, index: int) -> None:
    """Have a graph that replays random numbers take the state of the device ``index``."""
    if getattr(metadata, "graphsafe_rng_state_index", None) is not None:
        metadata.graphsafe_rng_state_index = index


def triton_environment() -> dict[str, str]:
    """Return the variables in Triton's own key that are set; none without it."""
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
    except ImportError:
        return {}
    return dict(get_cache_invalidating_env_vars())


# -- sizes, and guards on them


def name_of_source(source: Any) -> str | None:
    """Return where an input comes from, as Python would write it; ``None`` if that is not known."""
    try:
        return str(source.name() if callable(source.name) else source.name)
    except Exception:  # noqa: BLE001 - some have no such thing, and say so in their own ways
        return None


def shape_guards(context: TracingContext) -> Sequence[Any]:
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    return () if shapes is None else cast("Sequence[Any]", shapes.guards)


def named_symbols(context: TracingContext, symbols: Iterable[object]) -> dict[str, str] | None:
    """Return what each symbol is the size of; ``None`` if that is not known of one."""
    known = context.fake_mode.shape_env.var_to_sources
    named = {str(each): name_of_source(next(iter(known.get(each) or ()), None)) for each in symbols}
    return None if None in named.values() else cast("dict[str, str]", named)


def are_named(context: TracingContext, named: Mapping[str, str]) -> bool:
    """Return whether symbols of those names stand for these sizes in what is compiled for now."""
    symbols = context.fake_mode.shape_env.var_to_sources
    return named_symbols(context, [each for each in symbols if str(each) in named]) == {**named}


def value_of_symbol(context: TracingContext, expression: str) -> int | float | bool:
    """Evaluate a symbol, or an expression of some, with the sizes that are compiled for now.

    It adds no guard (torch's own would, until 2.14).
    """
    sizes = context.fake_mode.shape_env.backed_var_to_val
    values = {str(symbol): size for symbol, size in sizes.items()}
    functions = names.guard_functions.get()
    # What torch printed, out of a verified entry, as torch evaluates it when it adds the guard.
    return cast("int | float | bool", eval(expression, functions, values))  # noqa: S307


def branch_free() -> dict[str, object]:
    """Return ``min`` and ``max`` for guards on sizes, without a guard on which size it is.

    Python's own take a branch: calls that the code of a hit is right for would be compiled again.
    """
    import torch

    return {
        "min": lambda *sizes: functools.reduce(torch.sym_min, sizes),
        "max": lambda *sizes: functools.reduce(torch.sym_max, sizes),
    }


def guard_on_sizes(context: TracingContext, expression: str) -> None:
    """Have a guard checked that holds of the sizes that are compiled for now."""
    if not context.fake_mode.shape_env.deserialize_symexpr(expression):
        raise ValueError(f"{expression} does not hold")


def written(expression: object) -> str:
    """Return an expression over sizes as text that ``ShapeEnv.deserialize_symexpr`` reads."""
    return str(names.expression_printer.get()().doprint(expression))


def symbols_of(inputs: Sequence[object]) -> frozenset[object]:
    """Return the symbols that are inputs of a graph: torch's entries have guards on these."""
    import torch

    numbers = (value.node.expr for value in inputs if isinstance(value, torch.SymInt))
    return frozenset(symbol for symbol in numbers if getattr(symbol, "is_symbol", False))


def sizes_among(inputs: Sequence[object]) -> list[SymInt]:
    """Return the inputs that guards in torch's entries are about, in the order of their numbers."""
    import torch

    sizes = [value for value in inputs if isinstance(value, torch.SymInt)]
    return [size for size in sizes if size.node.hint is not None]


def name_of_size(size: SymInt) -> str | None:
    """Return what the program calls a size, as ``L['x'].size()[0]``, if torch knows."""
    sources = size.node.shape_env.var_to_sources.get(size.node.expr)
    return name_of_source(sources[0]) if sources else None


def holds_of_sizes(guards: str, sizes: Sequence[SymInt], values: Sequence[int]) -> bool:
    """Return whether guards of an entry of torch's hold of sizes that are ``values`` now."""
    if not sizes:
        return False
    return bool(sizes[0].node.shape_env.evaluate_guards_expression(guards, values))


# -- guards on inputs that AOTAutograd finds while it compiles, and Dynamo is to check


def sources_of_guard(guard: object) -> tuple[str, list[object], list[object]] | None:
    """Return the kind of a guard of AOTAutograd's and its inputs; ``None`` for another kind."""
    kind, fields = type(guard).__name__, getattr(guard, "__dict__", {})
    if type(guard) is names.duplicate_inputs.get():
        return kind, [fields["input_source_a"]], [fields["input_source_b"]]
    if type(guard) is names.storage_overlap.get():
        return kind, [*fields["overlapping_sources"]], [*fields["non_overlapping_sources"]]
    return None


def guard_holds(
    context: TracingContext, kind: str, some: Sequence[object], others: Sequence[object]
) -> bool:
    """Return whether a guard on these inputs holds; nothing is guarded because of this."""
    if kind == "DuplicateInputs":
        return some[0] is others[0]
    with context.fake_mode.shape_env.suppress_guards():
        found = names.overlapping.get()([*some, *others], symbolic=True)
    return bool(found == set(range(len(some))))


def guard_on(kind: str, some: list[object], others: list[object]) -> object:
    """Return the guard of which :func:`sources_of_guard` returned that, or raise ``ValueError``."""
    if kind == "DuplicateInputs" and len(some) == len(others) == 1:
        return names.duplicate_inputs.get()(some[0], others[0])
    if kind == "StorageOverlap":
        return names.storage_overlap.get()(some, others)
    raise ValueError(f"no guard is a {kind} on {len(some)} and {len(others)} inputs")


# -- Dynamo: graph breaks, automatic dynamic shapes, traces


def describe_break(reason: Any) -> dict[str, str]:
    """Return why Dynamo ended a graph, in one line, and where in the user's program."""
    stack = reason.user_stack
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
    return {"reason": reason.reason.strip().partition("\n")[0], "where": where}


def changing(state: ShapeState) -> tuple[tuple[bool, ...] | None, tuple[bool, ...] | None]:
    """Return which sizes and strides change; ``None`` where that is not known, as of a number."""
    changes = names.auto_dynamic.get()
    sizes, strides = (
        tuple(dim is changes for dim in dims) if isinstance(dims, tuple) else None
        for dims in (state.size, state.stride)
    )
    return sizes, strides


def with_changing(
    state: ShapeState, sizes: tuple[bool, ...] | None, strides: tuple[bool, ...] | None
) -> ShapeState:
    """Return a copy of the state, with what :func:`changing` returned for another one.

    A number stays as it was seen: it has no tuple of sizes.
    """
    changes, made = names.auto_dynamic.get(), copy.copy(state)
    for name, flags in (("size", sizes), ("stride", strides)):
        dims: object = getattr(made, name)
        if isinstance(dims, tuple) and flags is not None and len(dims) == len(flags):
            marked = (changes if flag else dim for dim, flag in zip(dims, flags, strict=True))
            setattr(made, name, tuple(marked))
    return made


@contextlib.contextmanager
def shown(event: str, level: str) -> Iterator[dict[str, object]]:
    """Show the block among torch's own events of a compile, with what is put into the mapping.

    That is in the trace of ``TORCH_TRACE`` and in a profiler's, where there is one. Events inside
    of one with the same name are left out, and so is one that fails.
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


# -- ranks, and first calls on fake tensors (DDPOptimizer)


def ranks_must_agree() -> bool:
    """Return whether ranks of this job exchange data while they compile: all have to, or none.

    Not where torch's own lookups see to it already.
    """
    return not names.sync_lookups.find() and ranks_exchange()


def ranks_exchange() -> bool:
    """Return whether ranks of this job exchange data while they compile, hits or not."""
    if not any(option.get() for option in names.EXCHANGING):
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


#: Namespaces of operators by which ranks exchange data.
COLLECTIVES = frozenset(
    {
        *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
        *("_dtensor", "symm_mem"),
    }
)


def groups_of_ranks() -> tuple[int, int, object] | None:
    """Return this process's rank, their number, and all groups by name; None outside of a job."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = names.groups.get()
    groups = sorted((name, sorted(world.pg_group_ranks[g])) for g, name in world.pg_names.items())
    return dist.get_rank(), dist.get_world_size(), groups


def needs_backward(inputs: Sequence[object]) -> bool:
    """Return whether torch makes a backward for a graph with these inputs, as far as they say."""
    import torch

    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in inputs
    )


@contextlib.contextmanager
def lowering_backward(aot_config: AOTConfig) -> Iterator[None]:
    """Set up, inside the compile of a forward, what torch lowers a backward under."""
    import torch

    with (
        torch.no_grad(),
        torch._C._DisableAutocast(),
        names.while_lowering.get()(aot_config, "backward"),
    ):
        yield


def copied(module: GraphModule) -> GraphModule:
    """Return a copy of a graph, for a compiler that changes it."""
    with names.without_fakes.get()():  # which cannot be copied into a mode of their own
        return copy.deepcopy(module)


def group_timeout_s() -> float:
    """Return how long ranks of this job wait for each other; infinity where there are none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return math.inf
    return float(names.default_store.get()().timeout.total_seconds())


def _context_of_fake_call() -> TracingContext | None:
    context = names.current_tracing_context.get()()
    return context if context is not None and context.fakify_first_call else None


def is_first_call_fake() -> bool:
    """Return whether the graph that is compiled now answers its first call with fake tensors."""
    return _context_of_fake_call() is not None


@contextlib.contextmanager
def first_calls_unasked() -> Iterator[None]:
    """Hide from torch, in the block, that first calls are to be on fake tensors."""
    context = _context_of_fake_call()
    if context is not None:
        context.fakify_first_call = False
    try:
        yield
    finally:
        if context is not None:
            context.fakify_first_call = True


def stand_in_for_metadata() -> None:
    """Have torch find metadata of a graph that is not compiled: DDPOptimizer insists on some."""
    context = _context_of_fake_call()
    if context is not None and context.fw_metadata is None:
        context.fw_metadata = object()


# -- graphs that were not traced here


class _Debug:
    """Stands for ``torch._inductor.debug``, which compiled graphs ask on each call.

    The module takes the place of this once anything imports it.
    """

    RECORD_GRAPH_EXECUTION = False

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module("torch._inductor.debug"), name)


def _stand_in_for_debug() -> None:
    inductor = importlib.import_module("torch._inductor")
    if "debug" not in vars(inductor):
        vars(inductor)["debug"] = _Debug()


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Set up what rebuilding an entry needs, where there is no trace."""
    mode = names.fake_mode.get()(shape_env=names.shape_env.get()())
    with names.tracing.get()(names.tracing_context.get()(mode)):
        yield


def fits_untraced(result: Any, inputs: Sequence[object]) -> bool:
    """Return whether guards on sizes, which torch keeps with an entry, hold for real inputs."""
    if not result.guards_expr:
        return True
    values = [value for value in inputs if type(value) is int]
    shapes = names.shape_env.get()()
    return bool(shapes.evaluate_guards_expression(result.guards_expr, values))


def call_untraced(result: Any, wrap: Function[object]) -> Function[object]:
    """Make a callable of an entry; its guards are those of the frame that calls it."""
    _stand_in_for_debug()
    result.guards_expr = None
    inductor = names.inductor_config.get()
    boxed = {
        "cudagraphs": names.boxed_bool.get()(bool(inductor.triton.cudagraphs)),
        "boxed_forward_device_index": names.boxed_index.get()(None),
    }
    wrapped = wrap(result, [], result.sanitized_aot_config, boxed)
    compiled = cast("Function[object]", wrapped)

    def forward(*inputs: object) -> object:
        return compiled([*inputs])

    return forward


# -- rebuilding a graph without what torch imports only in case: Inductor's lowerings
#
# Generated code names two things of those modules, and few graphs use them: each is found when it
# is used. torch itself asks one of them whether a test wants to see the code.

#: What imports Inductor's lowerings, and with them all else.
_LOWERING: Final = "torch._inductor.select_algorithm"
_PLANNING: Final = "torch._inductor.codegen.memory_planning"
#: Lines of generated code, and what they become.
_LINES: Final = {
    f"from {_LOWERING} import extern_kernels\n": "extern_kernels = _s3cache_kernels\n",
    f"from {_PLANNING} import _align as align\n": "align = _s3cache_align\n",
}
#: Kernels that are functions of torch's by the same name.
SAME_NAME: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_int_mm"})


def placed(code: CodeType, path: str) -> CodeType:
    """Return code, and what is inside of it, as that of another file."""
    if code.co_filename == path:
        return code
    constants = tuple(
        placed(each, path) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    return code.replace(co_consts=constants, co_filename=path)


class LateKernels:
    """Stands for ``extern_kernels``; imports Inductor for what is not torch's by the same name."""

    def __getattr__(self, name: str) -> object:
        import torch

        if name in SAME_NAME and _LOWERING not in sys.modules:
            found: object = getattr(torch, name)
        else:
            found = getattr(importlib.import_module(_LOWERING).extern_kernels, name)
        vars(self)[name] = found
        return found


def late_align(nbytes: object) -> object:
    """Do what Inductor's own function does, which it imports with all else."""
    aligned: object = importlib.import_module(_PLANNING)._align(nbytes)
    return aligned


def light(source: str) -> tuple[str, dict[str, object]]:
    """Return generated code that imports less, and the names that it needs for that."""
    for line, shorter in _LINES.items():
        source = source.replace(line, shorter, 1)
    return source, {"_s3cache_kernels": LateKernels(), "_s3cache_align": late_align}


_GRAPH: Final = "torch._inductor.graph"
_STAND_IN: Final = "_s3cache_graph"


class _GraphLowering:
    """Stands for Inductor's class, which tests make show them the code of a graph."""

    save_output_code = None


def without_graph(function: Function[_R]) -> Function[_R]:
    """Return ``function``, which asks Inductor's class for graphs; not where it is not imported."""
    return function if _GRAPH in sys.modules else _without_graph(function)


@functools.cache
def _without_graph(function: Function[_R]) -> Function[_R]:
    if not isinstance(function, FunctionType) or "graph" not in function.__code__.co_names:
        return function
    module = ModuleType(f"torch._inductor.{_STAND_IN}")
    vars(module)["GraphLowering"] = _GraphLowering
    sys.modules[module.__name__] = module
    names = tuple(_STAND_IN if name == "graph" else name for name in function.__code__.co_names)
    code = function.__code__.replace(co_names=names)
    copy = FunctionType(code, function.__globals__, function.__name__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return copy
