"""Code that Inductor generated: C++ libraries, Python modules, and kernels of Triton."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType

from s3cache.torch_api._declare import AnyClass, AnyFunction, Fields, Internal, Shape, Words
from s3cache.torch_api.protocols import (
    CachingAutotuner,
    CompiledGraph,
    CppLibraries,
    Function,
    PythonModules,
)

#: This one has a fallback of its own where it is used.
COMPILER_NAME = "naming the C++ compiler in entries"

_CODE = "torch._inductor.codecache"
_GRAPH = "torch._inductor.output_code:CompiledFxGraph"

compiled_graph: Internal[type[CompiledGraph]] = Internal(_GRAPH)
#: What its ``__del__`` asks for.
RUNNER = "compiled_fn_runner"
load_library = AnyFunction(f"{_CODE}:CppCodeCache.load_async")
load_module = AnyFunction(f"{_CODE}:PyCodeCache.load_by_key_path")
run_module: Internal[Function[ModuleType]] = Internal(f"{_CODE}:_reload_python_module")
#: Has the Python code of a graph that was unpickled run, from a file that it writes, if need be.
rebuild_module: Internal[Function[str]] = Internal(f"{_GRAPH}.after_deserialization")
path_of_module: Internal[Callable[[str, str], tuple[str, str, str]]] = Internal(f"{_CODE}:get_path")
cpp_compiler = AnyFunction("torch._inductor.cpp_builder:get_cpp_compiler", feature=COMPILER_NAME)
compiler_version: Internal[Callable[[str], str]] = Internal(
    "torch._inductor.cpp_builder:get_compiler_version_info", feature=COMPILER_NAME
)
_extern_choice = AnyClass("torch._inductor.select_algorithm:ExternKernelChoice")
Shape(_GRAPH, CompiledGraph)
Shape(f"{_CODE}:CppCodeCache", CppLibraries)
Shape(f"{_CODE}:PyCodeCache", PythonModules)

#: What tells one kernel from another, of the arguments it is compiled or loaded with.
KERNEL_ARGUMENTS = Words(
    f"{_CODE}:CppCodeCache.load_async", "main_code optimized_code device_type extra_flags"
)


def extern_kernels() -> set[str]:
    """Return names in ``extern_kernels`` that importing torch puts there.

    Those are variables of its modules; what a function registers while it lowers is none.
    """
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
    added={"_winners": (2, 13)},
)
#: The kernels that a compiled graph came with, or that were compiled for it.
(TRITON_BUNDLE,) = Fields(_GRAPH, "_triton_bundle")
_AUTOTUNER = "torch._inductor.runtime.triton_heuristics:CachingAutotuner"
Shape(_AUTOTUNER, CachingAutotuner)
#: What it keeps once it is loaded, which no pickle can hold.
LAUNCHERS, RELOAD = Fields(_AUTOTUNER, "launchers _reload_kernel")
#: What Triton's function keeps of the process and the file that it was read from, if it does.
BINDERS, FILE = "device_caches", "file_name"


def keep_launched_kernels(bundler: object) -> None:
    """Have the bundle hold every kernel that an autotuner in it launches.

    Once one configuration was chosen for a graph, torch drops the kernels that were not chosen, and
    with them those of autotuners that had nothing to choose between.
    """
    winners: set[str] | None = getattr(bundler, _WINNERS, None)
    if not winners:
        return
    winners.update(
        _triton_file_name.get()(result.kernel.hash)
        for static in getattr(bundler, _AUTOTUNERS) or ()
        for result in static.kernel.compile_results
    )


def with_triton_kernels(graphs: Iterable[object]) -> list[object]:
    """Return those of compiled graphs that have some."""
    bundles = ((graph, getattr(graph, TRITON_BUNDLE, None)) for graph in graphs)
    return [graph for graph, bundle in bundles if bundle and bundle.kernel_artifacts]


def triton_environment() -> dict[str, str]:
    """Return the variables in Triton's own key that are set; none without it."""
    try:
        from triton._C.libtriton import get_cache_invalidating_env_vars
    except ImportError:
        return {}
    return dict(get_cache_invalidating_env_vars())
