"""Inductor: its options, its cache of FX graphs, what programs register, and how it is called."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, cast

from s3cache.torch_api import AnyClass, AnyFunction, AnyObject, Fields, Flag, Internal, Predicate
from s3cache.torch_api.dispatcher import has_code_of_torch
from s3cache.torch_api.protocols import (
    CachingAutotuner,
    CompiledGraph,
    Config,
    CustomPass,
    DecompositionTable,
    Function,
    KeyDetails,
    KeyPickler,
)

# Features that fail alone: what they need of torch is declared with their names.

#: These have a fallback of their own where they are used.
BACKEND = 'backend="s3cache"'
LOCKDOWN = "private directories for torch's own caches"

_CODE = "torch._inductor.codecache"
_CONFIG = "torch._inductor.config"

# -- options

inductor_config = AnyObject(_CONFIG)
runtime_constant_folding = Flag(f"{_CONFIG}:aot_inductor.use_runtime_constant_folding")
#: How many threads C++ is made for, if not for as many as there are; or whether for any number.
cpp_threads = Internal[int](f"{_CONFIG}:cpp.threads")
cpp_dynamic_threads = Flag(f"{_CONFIG}:cpp.dynamic_threads")
pre_grad_pass_timing = Internal[str](f"{_CONFIG}:pre_grad_pass_timing", since=(2, 12))
_debugging = Flag(f"{_CONFIG}:trace.enabled")
_fallback_random = Flag(f"{_CONFIG}:fallback_random")
#: Whether torch has no caches at all, of whatever kind.
force_disable_caches = Flag("torch.compiler.config:force_disable_caches")
#: The variable that sets it, for processes that are started.
NO_CACHES = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"
Fields(_CONFIG, Config)
Fields(
    _CONFIG,
    """fx_graph_cache fx_graph_remote_cache freezing cpp_wrapper cpu_backend max_autotune
    max_autotune_gemm unsafe_marked_cacheable_functions pre_grad_custom_pass
    post_grad_custom_pre_pass post_grad_custom_post_pass joint_custom_pre_pass
    joint_custom_post_pass _pre_fusion_custom_pass _post_fusion_custom_pass
    _fuse_ddp_communication_passes custom_partitioner_fn
    _save_config_ignore _cache_config_ignore_prefix""",
)

#: Options of Inductor that say nothing about what is compiled; and the path of the compiler, which
#: a hit does not need and a reader may not have.
CACHING_OPTIONS_OF_INDUCTOR = Fields(
    _CONFIG,
    """cpp.cxx cpp_cache_precompile_headers
    autotune_num_choices_displayed developer_warnings disable_progress
    quiesce_async_compile_pool quiesce_async_compile_time verbose_progress
    worker_suppress_logging""",
)


def read_fields(fields: Fields, value: object) -> dict[str, object]:
    """Return each field by its name; ``None`` for those that this release does not have."""
    return {name: read_quietly(value, name, None) for name in fields}


def read_quietly(owner: object, name: str, *default: object) -> object:
    """Return what ``getattr`` does, without torch's warnings of what it is about to remove.

    Only deprecated options and what a module's ``__getattr__`` gives warn. Everything else is read
    as it is: to change the filters makes Python repeat warnings that it gives once.
    """
    names = vars(owner) if isinstance(owner, ModuleType) else {}
    option = (names.get("_config") or {}).get(name)
    warns = option is None or getattr(option, "deprecated", False)
    if not isinstance(owner, ModuleType) or name in names or not warns:
        return getattr(owner, name, *default)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(owner, name, *default)


def without_debugging(level: int) -> int:
    """Return how much to record of the origin of code, less what ``TORCH_COMPILE_DEBUG`` adds."""
    return 0 if level == 1 and _debugging.get() else level


def freezing_unasked() -> AbstractContextManager[object]:
    """Hide from torch, in the block, that it is to freeze what it cannot freeze.

    Its check refuses every graph under the option; it freezes those without gradients.
    """
    import torch

    if not (inductor_config.get().freezing and torch.is_grad_enabled()):
        return contextlib.nullcontext()
    hidden: AbstractContextManager[object] = inductor_config.get().patch(freezing=False)
    return hidden


# -- what torch keeps by itself

#: Its directory, which it makes; the environment names it from then on.
cache_dir = AnyFunction("torch._inductor.runtime.cache_dir_utils:cache_dir")
#: Has it forget what it has loaded from there, and where that was.
clear_caches = AnyFunction("torch._inductor.utils:clear_caches", feature=LOCKDOWN)
#: What ``torch.compiler.load_cache_artifacts`` does with what it has read.
populate_caches = AnyFunction(
    "torch.compiler._cache:CacheArtifactManager.populate_caches", feature=LOCKDOWN
)
#: Variables that name the directories in which it keeps what it compiles.
DIRECTORIES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


# -- keys and entries of FX graphs

_FX = f"{_CODE}:FxGraphCache"
_FX_DETAILS = f"{_CODE}:FxGraphHashDetails"
_FX_PICKLER = f"{_CODE}:FxGraphCachePickler"

fx_prepare_key = AnyFunction(f"{_FX}.prepare_key")
fx_check_cacheable = AnyFunction(f"{_FX}._check_can_cache")
fx_lookup = AnyFunction(f"{_FX}._lookup_graph")
fx_candidates = AnyFunction(f"{_FX}.iterate_over_candidates")
fx_save = AnyFunction(f"{_FX}._save_graph")
fx_write_to_local_cache = AnyFunction(f"{_FX}._write_to_local_cache")
fx_remote_cache = AnyFunction(f"{_FX}.get_remote_cache")
should_use_remote_fx_here = Predicate("torch._inductor.compile_fx:should_use_remote_fx_graph_cache")
should_use_remote_fx_cache = Predicate("torch._inductor.utils:should_use_remote_fx_graph_cache")
fx_key_details = Internal[type[KeyDetails]](_FX_DETAILS)
details_of = Internal[Function[KeyDetails]](_FX_DETAILS)
fx_pickler = Internal[Function[KeyPickler]](_FX_PICKLER)
_fx_get_key = Internal[Callable[[KeyPickler, object], str]](f"{_FX_PICKLER}.get_key", since=(2, 13))
_fx_get_hash = Internal[Callable[[KeyPickler, object], str]](f"{_FX_PICKLER}.get_hash")
fx_debug_lines = AnyFunction(f"{_FX_PICKLER}.debug_lines")
Fields(_FX_PICKLER, KeyPickler, added={"reducer_override": (2, 13)})
#: Details of an FX graph that are no settings.
GRAPHS_DETAILS = Fields(_FX_DETAILS, "gm example_inputs fx_kwargs")
#: What a key's pickler puts in place of an object: it returns its argument.
same = Internal[Callable[[object], object]](f"{_CODE}:_ident")
tensor_metadata = AnyFunction(f"{_CODE}:extract_tensor_metadata_for_cache_key")
is_frozen_param = Predicate("torch._inductor.freezing_utils:is_frozen_param")
has_frozen_params = Predicate("torch._inductor.freezing_utils:has_frozen_params")
can_inline_constant = Predicate("torch._inductor.graph:GraphLowering.can_inline_constant")
bisection_enabled = Flag("torch._inductor.compiler_bisector:CompilerBisector.bisection_enabled")
backward_state = AnyClass("torch.fx.experimental._backward_state:BackwardState")

#: What torch writes before the digest in the key of an FX graph.
FX_PREFIX = "f"


def fx_key() -> Internal[Callable[[KeyPickler, object], str]]:
    """Return what makes the key of an FX graph of its details."""
    return _fx_get_key if _fx_get_key.expected else _fx_get_hash


def fx_prefix() -> str:
    """Return what :func:`fx_key` writes before the digest."""
    return FX_PREFIX if _fx_get_key.expected else ""


def without_carried(arguments: Sequence[object]) -> Sequence[object]:
    """Return arguments of :data:`fx_check_cacheable` after the graph, less hooks among the inputs.

    A forward only carries those over to its backward. Until 2.12 the check gets the graph alone.
    """
    if not arguments:
        return arguments
    inputs, *others = arguments
    carried = backward_state.get()
    kept = [value for value in cast("Sequence[object]", inputs) if not isinstance(value, carried)]
    return [kept, *others]


def asks_fx_cache() -> bool:
    """Return whether Inductor asks its cache of FX graphs at all, as far as options tell."""
    return bool(inductor_config.get().fx_graph_cache) or should_use_remote_fx_cache.get()()


# -- custom passes, patterns and backends

_PASSES = "torch._inductor.custom_graph_pass"
PATTERN_MATCHER = "torch._inductor.pattern_matcher"
BACKENDS = "torch._inductor.codegen.common"

custom_graph_pass = Internal[type[CustomPass]](f"{_PASSES}:CustomGraphPass")
custom_partitioner = Internal[type[CustomPass]](f"{_PASSES}:CustomPartitionerFn")
custom_scheduler_pass = Internal[type[CustomPass]](f"{_PASSES}:CustomSchedulerPass", since=(2, 13))
custom_solver = Internal[type[CustomPass]](f"{_PASSES}:CustomKnapsackSolver")
custom_estimator = Internal[type[CustomPass]](f"{_PASSES}:CustomRuntimeEstimator")
_pattern_pass = AnyClass(f"{PATTERN_MATCHER}:PatternMatcherPass")
_pass_package = Internal[ModuleType]("torch._inductor.fx_passes")
Fields(f"{PATTERN_MATCHER}:PatternEntry", "pattern extra_check")
Fields(f"{PATTERN_MATCHER}:PatternMatcherPass", "patterns")
custom_backend_passes = Internal[Mapping[str, object]](f"{BACKENDS}:custom_backend_passes")
_device_codegens = Internal[Mapping[str, object]](f"{BACKENDS}:device_codegens")
_device_overrides = Internal[Mapping[str, object]](f"{BACKENDS}:device_op_overrides_dict")
#: Imports all backends, most of which nothing needs, and registers them.
init_backends = AnyFunction(f"{_CODE}:init_backend_registration")
_choices = AnyObject("torch._inductor.virtualized:_choices")
_virtual = AnyObject("torch._inductor.virtualized:threadlocal")
_default_handler = AnyClass("torch._inductor.ops_handler:DefaultHandler")
#: Calls of these stay in a graph whether or not what they return is used.
side_effectful = Internal[set[object]]("torch.fx.node:_side_effectful_functions")
#: Which operators, and what is done for them on fake tensors; the first that agrees is asked.
fake_rules = Internal[list[tuple[object, object]]](
    "torch._subclasses.fake_impls:op_implementations_checks"
)

# What most names in a module stand for.
_NO_PASSES = frozenset((FunctionType, BuiltinFunctionType, ModuleType, type, str, int, bool))


def pattern_passes() -> list[tuple[str, Any]]:
    """Return what patterns are registered with, by its place, in modules that are imported."""
    return _pattern_passes(len(vars(_pass_package.get())))


@functools.lru_cache(maxsize=1)
def _pattern_passes(_imported: int) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, Any]] = {}
    package = vars(_pass_package.get())
    for name, module in sorted((n, m) for n, m in package.items() if type(m) is ModuleType):
        for attribute, value in list(vars(module).items()):
            if type(value) not in _NO_PASSES:
                for which, each in _passes_in(value):
                    found.setdefault(id(each), (f"{name}.{attribute}{which}", each))
    return list(found.values())


def _passes_in(value: object) -> Iterator[tuple[str, Any]]:
    kind = _pattern_pass.get()
    if isinstance(value, kind):
        yield "", value
    elif isinstance(value, (dict, list, tuple)) and value:
        named = value if isinstance(value, dict) else dict(enumerate(value[:9]))
        if isinstance(next(iter(named.values())), kind):
            yield from ((f"[{key}]", each) for key, each in named.items())


def registries_by_device() -> list[tuple[str, Mapping[str, object]]]:
    """Return how code is made for each device: schedulers and wrappers, and what these call."""
    return [("backend", _device_codegens.get()), ("operations", _device_overrides.get())]


def generated_operations() -> list[FunctionType]:
    """Return functions of Inductor's that it makes from text, so that no file has their code."""
    values = vars(_default_handler.get()).values()
    return [value for value in values if isinstance(value, FunctionType)]


def choices_handler() -> object:
    """Return what decides between ways to compile something, if that was set; else ``None``."""
    return getattr(_virtual.get(), _choices.get()._key, None)


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


def passes_by_device(passes: Sequence[object]) -> dict[str, object]:
    """Return which device has which of the passes that a key has of backends, less ``None``."""
    devices = list(custom_backend_passes.get())
    return {device: each for device, each in zip(devices, passes, strict=True) if each is not None}


# -- how Inductor is called

compile_fx = AnyFunction("torch._inductor.compile_fx:compile_fx")
compile_fx_inner = Internal[Function[CompiledGraph]]("torch._inductor.compile_fx:_compile_fx_inner")
inductor_backend = Internal[Function[Function[Function[object]]]](
    "torch:_TorchCompileInductorWrapper", feature=BACKEND
)
cpp_wrapper_options = AnyFunction("torch._inductor.compile_fx:get_cpp_wrapper_config")
#: What holds the decompositions that a backend of the user's has given.
given_decompositions = Internal[type[DecompositionTable]](
    "torch._inductor.compile_fx:_ConstantDecompTable", since=(2, 13)
)
_decompositions = Internal[Mapping[object, object]]("torch._inductor.decomposition:decompositions")
_decompositions_with_random = AnyObject("torch._inductor.decomposition:fast_random_decomps")
_random_decompositions = Internal[Mapping[object, object]](
    "torch._inductor.decomposition:extra_random_decomps"
)


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


def usual_decompositions() -> Mapping[object, object]:
    """Return the table that Inductor decomposes by where it is given none."""
    if _fallback_random.get():
        return _decompositions.get()
    return cast("Mapping[object, object]", _decompositions_with_random.get()())


def stale_decompositions() -> tuple[Mapping[object, object], Mapping[object, object]] | None:
    """Return what torch decomposes by, and would if it remembered nothing; ``None`` if equal.

    It makes one table of two when it first needs it, and what is put into those later is not in it.
    """
    memo = _decompositions_with_random.get()
    if not memo.cache_info().currsize:
        return None
    now, fresh = memo(), {**_decompositions.get(), **_random_decompositions.get()}
    return None if now == fresh else (now, fresh)


# -- kernels

_GRAPH = "torch._inductor.output_code:CompiledFxGraph"

compiled_graph = Internal[type[CompiledGraph]](_GRAPH)
#: What its ``__del__`` asks for.
RUNNER = "compiled_fn_runner"
load_library = AnyFunction(f"{_CODE}:CppCodeCache.load_async")
load_module = AnyFunction(f"{_CODE}:PyCodeCache.load_by_key_path")
run_module = Internal[Function[ModuleType]](f"{_CODE}:_reload_python_module")
#: Has the Python code of a graph that was unpickled run, from a file that it writes, if need be.
rebuild_module = Internal[Function[str]](f"{_GRAPH}.after_deserialization")
path_of_module = Internal[Callable[[str, str], tuple[str, str, str]]](f"{_CODE}:get_path")
_extern_choice = AnyClass("torch._inductor.select_algorithm:ExternKernelChoice")
Fields(_GRAPH, CompiledGraph)
Fields(f"{_CODE}:CppCodeCache", "__name__ _load_library")
Fields(f"{_CODE}:PyCodeCache", "modules_no_attr")

#: What tells one kernel from another, of the arguments it is compiled or loaded with.
KERNEL_ARGUMENTS = Fields(
    f"{_CODE}:CppCodeCache.load_async", "main_code optimized_code device_type extra_flags"
)


def extern_kernels() -> set[str]:
    """Return names in ``extern_kernels`` that importing torch puts there: variables of modules."""
    kind = _extern_choice.get()
    return {
        str(vars(value)["name"])
        for name, module in list(sys.modules.items())
        if name.startswith("torch._inductor.")
        for value in list(vars(module).values())
        if type(value) is kind
    }


# -- Triton

#: Writes the kernels of an entry to Triton's directory, and loads some of them from there.
emit_triton_bundle = AnyFunction("torch._inductor.triton_bundler:TritonBundler.read_and_emit")
#: Makes the bundle of a graph's kernels, once the graph is compiled.
collect_triton_bundle = AnyFunction("torch._inductor.triton_bundler:TritonBundler.collect")
triton_directory = AnyFunction("torch._inductor.runtime.runtime_utils:triton_cache_dir")
#: What remembers which configuration of a kernel was the fastest, in a file beside its source.
autotune_cache = AnyClass("torch._inductor.runtime.autotune_cache:AutotuneCache")
_triton_file_name = AnyFunction("torch._inductor.runtime.runtime_utils:triton_hash_to_path_key")
Fields("torch._inductor.runtime.autotune_cache:AutotuneCache", "configs_hash create save")
_WINNERS, _AUTOTUNERS = Fields(
    "torch._inductor.triton_bundler:TritonBundler",
    "_winners _static_autotuners",
    added={"_winners": (2, 12)},
)
#: The kernels that a compiled graph came with, or that were compiled for it.
(TRITON_BUNDLE,) = Fields(_GRAPH, "_triton_bundle")
_AUTOTUNER = "torch._inductor.runtime.triton_heuristics:CachingAutotuner"
Fields(_AUTOTUNER, CachingAutotuner)
#: What it keeps once it is loaded, which no pickle can hold.
LAUNCHERS, RELOAD = Fields(_AUTOTUNER, "launchers _reload_kernel")
#: What Triton's function keeps of the process and the file that it was read from, if it does.
BINDERS, FILE = "device_caches", "file_name"


def keep_launched_kernels(bundler: object) -> None:
    """Have the bundle hold every kernel that an autotuner in it launches.

    torch drops those of autotuners that had nothing to choose between.
    """
    winners: set[str] | None = getattr(bundler, _WINNERS, None)
    if not winners:
        return
    winners.update(
        _triton_file_name.get()(result.kernel.hash)
        for static in getattr(bundler, _AUTOTUNERS) or ()
        for result in static.kernel.compile_results
    )


def triton_environment() -> dict[str, str]:
    """Return the variables in Triton's own key that are set; none without it."""
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
    except ImportError:
        return {}
    return dict(get_cache_invalidating_env_vars())
