"""The seam at torch's bundling: graphs that will be saved hold their code, and no others do.

Between a lookup that misses and the save, torch compiles the graph's forward and backward. With
``bundled_autograd_cache`` one entry holds a whole graph, and Inductor leaves its own cache of FX
graphs alone. That must hold for the graphs that s3cache saves and for nothing else: what cannot be
cached as a whole still finds its parts in torch's cache. The option cannot simply be set: it would
be part of torch's key, and options are set for one thread only.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from s3cache.hooks._patching import Patches
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CompiledGraph, Function, TracingContext

__all__ = ["Bundling"]


class Bundling:
    """Which compiles end in an entry; a compile is known by its tracing context."""

    def __init__(self) -> None:
        self._contexts: weakref.WeakSet[TracingContext] = weakref.WeakSet()

    def begin(self) -> None:
        """The graph that is being traced now will be saved."""
        context = internals.current_tracing_context.get()()
        if context is not None:
            self._contexts.add(context)

    def install(self, patches: Patches) -> None:
        """Have torch bundle where :meth:`begin` was called, as if the option were set."""
        patches.replace(internals.should_bundle, self._or_begun)
        patches.replace(internals.should_bundle_compiled, self._or_begun)
        patches.replace(internals.compile_fx_inner, self._compiler)

    def _begun(self) -> bool:
        return internals.current_tracing_context.get()() in self._contexts

    def _or_begun(self, asked: Callable[[], bool]) -> Callable[[], bool]:
        def should_bundle_autograd_cache() -> bool:
            return self._begun() or asked()

        return should_bundle_autograd_cache

    def _compiler(self, compile_inner: Function[CompiledGraph]) -> Function[CompiledGraph]:
        def compile_fx_inner(*args: object, **kwargs: object) -> CompiledGraph:
            if not self._begun():
                return compile_inner(*args, **kwargs)
            started = time.monotonic_ns()
            with internals.functorch_config.get().patch(bundled_autograd_cache=True):
                graph = compile_inner(*args, **kwargs)
            # torch notes it only where it does not bundle, and takes a backward's from here.
            graph._time_taken_ns = time.monotonic_ns() - started
            return graph

        return compile_fx_inner
