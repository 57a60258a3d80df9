"""The seam at compiles that end in an entry: they are bundled, and what a hit needs beside is kept.

Between a lookup that misses and the save, torch compiles the graph's forward and backward. With
``bundled_autograd_cache`` one entry holds a whole graph. That must hold for the graphs that s3cache
saves and for nothing else. The option cannot simply be set: it would be part of torch's key,
options are set for one thread only, and Inductor would leave its cache of FX graphs alone, which
is the second level here (``_fx_graphs``). Only where Inductor does not cache a half by itself is it
set for that half: the entry then gets what the second level would have collected.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from s3cache.hooks._first_calls import Described, UndescribedError, described_outputs
from s3cache.hooks._patching import Patches
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import (
        CompiledGraph,
        FirstCallWrapper,
        Function,
        RuntimeMetadata,
        TracingContext,
    )

__all__ = ["Bundling"]

# As many keys as there may be between a lookup that misses and the save.
_REMEMBERED = 1024


class _Thread(threading.local):
    """Where an option that was set for the half that is compiled now is taken back."""

    half: contextlib.ExitStack | None = None


class Bundling:
    """Which compiles end in an entry; a compile is known by its tracing context."""

    def __init__(self) -> None:
        self._thread = _Thread()
        # DDPOptimizer compiles several graphs in one context, one after the other.
        self._keys: weakref.WeakKeyDictionary[TracingContext, str] = weakref.WeakKeyDictionary()
        self._outputs: OrderedDict[str, list[Described] | UndescribedError] = OrderedDict()

    def begin(self, key: str) -> None:
        """The graph that is being traced now will be saved under ``key``."""
        context = internals.current_tracing_context.get()()
        if context is not None:
            self._keys[context] = key

    def is_under_way(self) -> bool:
        """Whether what is compiled now is to become a part of an entry."""
        return self._begun() is not None

    def bundle_here(self) -> bool:
        """Have torch bundle the half that it compiles now, if it is to become part of an entry."""
        half = self._thread.half
        if half is not None:
            half.enter_context(internals.functorch_config.get().patch(bundled_autograd_cache=True))
        return half is not None

    def outputs(self, key: str) -> list[Described] | None:
        """What the graph answers a fake first call with; ``None`` if nobody asks for one.

        Raises:
            UndescribedError: it cannot be described.
        """
        outputs = self._outputs.get(key)
        if isinstance(outputs, UndescribedError):
            raise outputs
        return outputs

    def install(self, patches: Patches) -> None:
        """Have torch bundle where :meth:`begin` was called, as if the option were set."""
        patches.replace(internals.should_bundle, self._or_begun)
        patches.replace(internals.should_bundle_compiled, self._or_begun)
        patches.replace(internals.compile_fx_inner, self._compiler)
        patches.replace(internals.answer_first_call, self._answerer)

    def _begun(self) -> str | None:
        context = internals.current_tracing_context.get()()
        return None if context is None else self._keys.get(context)

    def _or_begun(self, asked: Callable[[], bool]) -> Callable[[], bool]:
        def should_bundle_autograd_cache() -> bool:
            return self._begun() is not None or asked()

        return should_bundle_autograd_cache

    def _compiler(self, compile_inner: Function[CompiledGraph]) -> Function[CompiledGraph]:
        def compile_fx_inner(gm: GraphModule, *args: object, **kwargs: object) -> CompiledGraph:
            if self._begun() is None:
                return compile_inner(gm, *args, **kwargs)
            started = time.monotonic_ns()
            outer = self._thread.half
            with contextlib.ExitStack() as self._thread.half:
                try:
                    # A half that does nothing is not compiled at all, unless torch bundles.
                    if not (internals.asks_fx_cache() and internals.count_calls.get()(gm.graph)):
                        self.bundle_here()
                    graph = compile_inner(gm, *args, **kwargs)
                finally:
                    self._thread.half = outer
            # torch notes it only where it does not bundle, and takes a backward's from here.
            if graph._time_taken_ns is None:
                graph._time_taken_ns = time.monotonic_ns() - started
            return graph

        return compile_fx_inner

    def _answerer(self, original: Function[object]) -> Function[object]:
        def post_compile(
            wrapper: FirstCallWrapper,
            *args: object,
            runtime_metadata: RuntimeMetadata,
            **kwargs: object,
        ) -> object:
            function = original(wrapper, *args, runtime_metadata=runtime_metadata, **kwargs)
            key = self._begun()
            if wrapper.needs_post_compile and key is not None:
                # In the strides that Inductor chose: the original has put them there.
                self._remember(key, wrapper, runtime_metadata)
            return function

        return post_compile

    def _remember(self, key: str, wrapper: FirstCallWrapper, metadata: RuntimeMetadata) -> None:
        try:
            self._outputs[key] = described_outputs(wrapper.out_metas, metadata)
        except UndescribedError as exc:
            self._outputs[key] = exc
        while len(self._outputs) > _REMEMBERED:
            self._outputs.popitem(last=False)
