"""The seam at torch's bundling: graphs that will be saved hold their code, and no others do.

With ``bundled_autograd_cache`` one entry holds a whole graph, and Inductor leaves its own cache of
FX graphs alone. That must hold for the graphs that s3cache saves and for nothing else: what cannot
be cached as a whole still finds its parts in torch's cache. The option cannot simply be set: it
would be part of torch's key, and options are set for one thread only.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

from s3cache.hooks._patching import Patches

__all__ = ["Bundles"]


class Bundles:
    """Which compiles end in an entry; a compile is known by its tracing context."""

    def __init__(self) -> None:
        self._contexts: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self) -> None:
        """The graph that is being traced now will be saved."""
        context = _context()
        if context is not None:
            self._contexts.add(context)

    def install(self, patches: Patches, autograd_cache: Any) -> None:
        """Have torch bundle where :meth:`begin` was called, as if the option were set."""
        from torch._functorch import config
        from torch._functorch._aot_autograd import graph_compile
        from torch._inductor import compile_fx

        asked = autograd_cache.should_bundle_autograd_cache
        compile_inner = compile_fx._compile_fx_inner

        def should_bundle_autograd_cache() -> bool:
            return self._begun() or bool(asked())

        def compile_fx_inner(*args: Any, **kwargs: Any) -> Any:
            if not self._begun():
                return compile_inner(*args, **kwargs)
            started = time.monotonic_ns()
            with config.patch(bundled_autograd_cache=True):
                graph = compile_inner(*args, **kwargs)
            # torch notes it only where it does not bundle, and takes a backward's from here.
            graph._time_taken_ns = time.monotonic_ns() - started
            return graph

        for module in (autograd_cache, graph_compile):
            patches.set(module, "should_bundle_autograd_cache", should_bundle_autograd_cache)
        patches.set(compile_fx, "_compile_fx_inner", compile_fx_inner)

    def _begun(self) -> bool:
        return _context() in self._contexts


def _context() -> Any:
    import torch

    return torch._guards.TracingContext.try_get()
