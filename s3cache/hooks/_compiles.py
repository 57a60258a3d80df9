"""Compiles that end in an entry: from the lookup that misses to the save.

Between the two, torch compiles the graph's forward and backward. With ``bundled_autograd_cache``
one entry holds a whole graph, which must be so for the graphs that s3cache saves and for no others.
The option cannot simply be set: it would be part of torch's key, options are set for one thread
only, and Inductor would ignore its cache of FX graphs, the second level here. It is set only for an
FX graph that Inductor does not cache by itself.

What a compile finds out about the program beyond its key, an entry has as :class:`Conditions`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict

from s3cache.artifact import CONDITIONS
from s3cache.errors import code_of
from s3cache.graph import reads_storage_offsets, settings_digest, storage_offsets
from s3cache.hooks._conditions import Conditions, NotSharableError
from s3cache.hooks._keys import CompileState, around
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.hooks._distributed import OutputDescription
    from s3cache.torch_api.protocols import (
        AOTConfig,
        AOTResult,
        CompiledGraph,
        FirstCallWrapper,
        RuntimeMetadata,
        TracingContext,
    )

logger = logger_of("saves")

#: The attribute of a compiled graph that has what was noted of it.
FX_INFO = "s3cache_fx_info"


class FxInfo(TypedDict):
    """What is noted of an FX graph while it is lowered, until the entry is saved.

    ``late`` if it is a backward that is lowered when it is first called, under the settings of
    which ``lowered`` is the digest, if they have one.
    """

    sees_places: bool
    late: bool
    lowered: str | None


def _unrecorded(what: str) -> NotSharableError:
    return NotSharableError("unrecorded", what)


class Compile:
    """One compile that is to end in an entry, from the lookup that missed to the next lookup."""

    def __init__(
        self,
        context: TracingContext,
        key: str,
        config: AOTConfig,
        inputs: Sequence[object],
        *,
        of_threads: bool,
    ) -> None:
        self.key = key
        self.of_threads = of_threads  # whether code is made for the number of threads
        self.places = storage_offsets(inputs)
        self._sources = config.aot_autograd_arg_pos_to_source or ()
        # Sizes that are inputs: guards on these are in torch's entry.
        self._symbols = internals.symbols_of(inputs)
        # How many of AOTAutograd's guards there are before, and on sizes; the same in the end.
        self._before = _counts(context)
        self._until: tuple[int, int] | None = None
        self._dynamos = len(context.guards_context.dynamo_guards)
        self._strays = False  # whether guards of Dynamo's own were added
        # What it answers a first call on fake tensors with, if there was one.
        self.outputs: list[OutputDescription] | NotSharableError | None = None

    def end(self, context: TracingContext) -> None:
        """Leave what is added from now on to another graph."""
        self._until = self._until or _counts(context)

    def look(self, context: TracingContext) -> None:
        """Count Dynamo's own guards, as long as it still has them."""
        if self._until is None:
            self._strays |= len(context.guards_context.dynamo_guards) != self._dynamos

    def added_guards(self, context: TracingContext) -> Iterator[tuple[str, list[int], list[int]]]:
        """Yield the guards that compiling it has added, by index of the inputs."""
        if self._strays:
            raise _unrecorded("guards of Dynamo's own")
        until, _ = self._until or _counts(context)
        for guard in context.guards_context.aotautograd_guards[self._before[0] : until]:
            known = internals.sources_of_guard(guard)
            if known is None:
                raise _unrecorded(f"a guard of an unknown kind ({type(guard).__name__})")
            kind, some, others = known
            yield kind, self._indices(some), self._indices(others)

    def added_sizes(self, context: TracingContext) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the guards on sizes that it has added and that torch's entry leaves out."""
        _, until = self._until or _counts(context)
        for guard in internals.shape_guards(context)[self._before[1] : until]:
            if guard.expr.free_symbols <= self._symbols:
                continue
            named = internals.named_symbols(context, guard.expr.free_symbols)
            if named is None:
                raise _unrecorded(f"a guard on something that has no name ({guard.expr})")
            yield internals.written(guard.expr), named

    def _indices(self, sources: Sequence[object]) -> list[int]:
        try:
            return [self._sources.index(source) for source in sources]
        except ValueError:
            raise _unrecorded("a guard on something that is no input") from None


def _counts(context: TracingContext) -> tuple[int, int]:
    return len(context.guards_context.aotautograd_guards), len(internals.shape_guards(context))


def note_conditions(entry: AOTResult, compile_: Compile | None) -> Conditions:
    """Put what the code in ``entry`` relies on into it, before it is pickled."""
    context = internals.current_tracing_context.get()()
    if compile_ is None or context is None:
        raise _unrecorded("its compile was not observed")
    infos: list[FxInfo] = []
    for compiled in (entry.compiled_fw, entry.compiled_bw):
        if compiled is not None:
            info: FxInfo | None = getattr(compiled.result, FX_INFO, None)
            if info is None:
                raise _unrecorded("the compile of its forward or backward was not observed")
            infos.append(info)
    if any(info["late"] and info["lowered"] is None for info in infos):
        raise _unrecorded("the settings that its backward was lowered under have no digest")
    conditions: Conditions = {
        "guards": list(compile_.added_guards(context)),
        "sizes": list(compile_.added_sizes(context)),
        "places": compile_.places if any(info["sees_places"] for info in infos) else None,
        "lowered": infos[-1]["lowered"],
        "of_threads": compile_.of_threads,
    }
    setattr(entry, CONDITIONS, conditions)
    return conditions


class PendingCompiles:
    """Compiles that end in an entry, each known by its tracing context."""

    def __init__(self, state: CompileState, version_of: Callable[[object], str | None]) -> None:
        self._state = state
        self._version_of = version_of
        # DDPOptimizer compiles several graphs in one context, one after the other.
        self.contexts: weakref.WeakKeyDictionary[TracingContext, list[Compile]] = (
            weakref.WeakKeyDictionary()
        )

    def end(self) -> None:
        """End the current compile: another graph is about to be looked up."""
        context, compile_ = self._current()
        if context is not None and compile_ is not None:
            compile_.end(context)

    def begin(
        self, key: str, config: AOTConfig, inputs: Sequence[object], *, of_threads: bool
    ) -> None:
        """Note that the graph that is being traced will be saved under ``key``."""
        context = internals.current_tracing_context.get()()
        if context is not None:
            compile_ = Compile(context, key, config, inputs, of_threads=of_threads)
            self.contexts.setdefault(context, []).append(compile_)

    def compile_of(self, key: str) -> Compile | None:
        """Return the compile that ends in an entry under ``key``."""
        context = internals.current_tracing_context.get()()
        compiles = () if context is None else self.contexts.get(context, ())
        return next((each for each in reversed(compiles) if each.key == key), None)

    def is_compiling_entry(self) -> bool:
        """Return whether what is compiled now will be part of an entry."""
        return self._current()[1] is not None

    def force_bundling(self) -> bool:
        """Have torch bundle the current FX graph if it will be part of an entry."""
        options = self._state.fx_options
        if options is not None:
            functorch = internals.functorch_config.get()
            options.enter_context(functorch.patch(bundled_autograd_cache=True))
        return options is not None

    def _current(self) -> tuple[TracingContext | None, Compile | None]:
        context = internals.current_tracing_context.get()()
        compiles = None if context is None else self.contexts.get(context)
        return context, compiles[-1] if compiles else None

    @around(internals.should_bundle, internals.should_bundle_compiled)
    def _should_bundle(self, asked: Callable[[], bool]) -> bool:
        return self.is_compiling_entry() or asked()

    @around(internals.compile_fx_inner)
    def _compile_graph(
        self, original: Function[CompiledGraph], gm: GraphModule, *args: object, **kwargs: object
    ) -> CompiledGraph:
        context, compile_ = self._current()
        if context is None or compile_ is None:
            return original(gm, *args, **kwargs)
        started = time.monotonic_ns()
        info = self._fx_info(gm, compile_, is_backward=bool(kwargs.get("is_backward")))
        with contextlib.ExitStack() as options, self._state.changed(fx_options=options):
            # A graph that does nothing is not compiled at all, unless torch bundles.
            if not (internals.asks_fx_cache() and internals.count_calls.get()(gm.graph)):
                self.force_bundling()
            graph = original(gm, *args, **kwargs)
        if info is not None:
            if not info["late"]:
                compile_.look(context)
            setattr(graph, FX_INFO, info)
        # torch notes it only where it does not bundle, and takes a backward's from here.
        if graph._time_taken_ns is None:
            graph._time_taken_ns = time.monotonic_ns() - started
        return graph

    def _fx_info(self, gm: GraphModule, compile_: Compile, *, is_backward: bool) -> FxInfo | None:
        """Return what to note of an FX graph that will be lowered; ``None`` if it cannot be."""
        late = is_backward and not self._state.depth
        try:
            lowered = None
            if late:
                lowered = settings_digest(
                    of_threads=compile_.of_threads, registered_version=self._version_of
                )
            return {"sees_places": reads_storage_offsets(gm), "late": late, "lowered": lowered}
        except Exception as exc:  # the user's program goes on
            logger.warning(
                "a graph will not be cached as a whole %s", pointer(code_of(exc)), exc_info=True
            )
            return None

    @around(internals.answer_first_call)
    def _answer_first_call(
        self,
        original: Function[object],
        wrapper: FirstCallWrapper,
        *args: object,
        runtime_metadata: RuntimeMetadata,
        **kwargs: object,
    ) -> object:
        function = original(wrapper, *args, runtime_metadata=runtime_metadata, **kwargs)
        compile_ = self._current()[1]
        if wrapper.needs_post_compile and compile_ is not None:
            from s3cache.hooks._distributed import describe_outputs

            try:  # in the strides that Inductor chose: the original has put them there
                compile_.outputs = describe_outputs(wrapper.out_metas, runtime_metadata)
            except NotSharableError as exc:
                compile_.outputs = exc
        return function
