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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from s3cache._logs import logger_of
from s3cache._pages import pointer
from s3cache._problems import code_of
from s3cache.graph import sees_places, settings_digest
from s3cache.hooks._backwards import Backwards
from s3cache.hooks._conditions import Compile, Half, note_half
from s3cache.hooks._first_calls import Described, UndescribedError, described_outputs
from s3cache.hooks._patching import Patches
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import (
        AOTConfig,
        CompiledGraph,
        FirstCallWrapper,
        Function,
        RuntimeMetadata,
        TracingContext,
    )

__all__ = ["Bundling"]

logger = logger_of("saves")

# As many keys as there may be between a lookup that misses and the save.
_REMEMBERED = 1024


class _Thread(threading.local):
    """Where an option that was set for the half that is compiled now is taken back."""

    half: contextlib.ExitStack | None = None


class Bundling:
    """Which compiles end in an entry; a compile is known by its tracing context."""

    def __init__(self, backwards: Backwards) -> None:
        self._thread = _Thread()
        self._backwards = backwards
        # DDPOptimizer compiles several graphs in one context, one after the other.
        self._compiles: weakref.WeakKeyDictionary[TracingContext, list[Compile]] = (
            weakref.WeakKeyDictionary()
        )
        self._outputs: OrderedDict[str, list[Described] | UndescribedError] = OrderedDict()

    def end(self) -> None:
        """Another graph is about to be looked up."""
        context, compile_ = self._current()
        if context is not None and compile_ is not None:
            compile_.end(context)

    def begin(
        self, key: str, config: AOTConfig, inputs: Sequence[object], *, of_threads: bool
    ) -> None:
        """The graph that is being traced now will be saved under ``key``.

        Args:
            of_threads: whether its code is made for the number of threads.
        """
        context = internals.current_tracing_context.get()()
        if context is not None:
            compile_ = Compile.begun(context, key, config, inputs, of_threads=of_threads)
            self._compiles.setdefault(context, []).append(compile_)

    def compile_of(self, key: str) -> Compile | None:
        """What is known of the compile that ends in an entry under ``key`` now."""
        context = internals.current_tracing_context.get()()
        compiles = () if context is None else self._compiles.get(context, ())
        return next((each for each in reversed(compiles) if each.key == key), None)

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

    def _current(self) -> tuple[TracingContext | None, Compile | None]:
        context = internals.current_tracing_context.get()()
        compiles = None if context is None else self._compiles.get(context)
        return context, compiles[-1] if compiles else None

    def _begun(self) -> str | None:
        compile_ = self._current()[1]
        return None if compile_ is None else compile_.key

    def _or_begun(self, asked: Callable[[], bool]) -> Callable[[], bool]:
        def should_bundle_autograd_cache() -> bool:
            return self._begun() is not None or asked()

        return should_bundle_autograd_cache

    def _compiler(self, compile_inner: Function[CompiledGraph]) -> Function[CompiledGraph]:
        def compile_fx_inner(gm: GraphModule, *args: object, **kwargs: object) -> CompiledGraph:
            context, compile_ = self._current()
            if context is None or compile_ is None:
                return compile_inner(gm, *args, **kwargs)
            started = time.monotonic_ns()
            half = self._half(gm, compile_, is_backward=bool(kwargs.get("is_backward")))
            outer = self._thread.half
            with contextlib.ExitStack() as self._thread.half:
                try:
                    # A half that does nothing is not compiled at all, unless torch bundles.
                    if not (internals.asks_fx_cache() and internals.count_calls.get()(gm.graph)):
                        self.bundle_here()
                    graph = compile_inner(gm, *args, **kwargs)
                finally:
                    self._thread.half = outer
            if half is not None:
                if not half["late"]:
                    compile_.look(context)
                note_half(graph, half)
            # torch notes it only where it does not bundle, and takes a backward's from here.
            if graph._time_taken_ns is None:
                graph._time_taken_ns = time.monotonic_ns() - started
            return graph

        return compile_fx_inner

    def _half(self, gm: GraphModule, compile_: Compile, *, is_backward: bool) -> Half | None:
        """What there is to note of a half that is about to be lowered; without, it is not saved."""
        late = is_backward and self._backwards.are_late()
        threads, vouched = compile_.of_threads, self._backwards.vouched
        try:
            return {
                "sees_places": sees_places(gm),
                "late": late,
                "lowered": settings_digest(of_threads=threads, vouched=vouched) if late else None,
            }
        except Exception as exc:  # the user's program goes on
            logger.warning(
                "a graph will not be cached as a whole %s", pointer(code_of(exc)), exc_info=True
            )
            return None

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
