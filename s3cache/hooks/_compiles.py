"""Compiles that we save: from the lookup that misses to the save, at both levels.

Between the two, torch compiles the graph's forward and backward. With ``bundled_autograd_cache``
torch saves both in one entry. Setting the option for a program would change torch's keys, would
reach one thread only, and would make Inductor ignore its cache of FX graphs, which is our second
level. So we set it only while an FX graph is compiled that Inductor does not cache by itself.

torch's own ``save`` pickles an entry, records it for ``save_cache_artifacts``, and writes it to
torch's directory. We intercept that write: result, kernels and description become a frame. Results
that cannot be shared go to torch's directory, as without s3cache. Entries that the second level
saves while a whole graph is compiled stay: other graphs may share them.

A graph that has no key of ours may have one of torch's. torch saves it under that, as without
s3cache, and we save only its FX graphs.
"""

from __future__ import annotations

import contextlib
import inspect
import platform
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypedDict, cast

from s3cache.artifact import CONDITIONS, Artifact, describe, unpickle
from s3cache.cache import Engine, NotSaved, Saved
from s3cache.errors import CorruptError
from s3cache.frame import Frame, decode
from s3cache.graph import (
    FIRST_CALL,
    BypassReason,
    Code,
    reads_storage_offsets,
    settings_digest,
    storage_offsets,
)
from s3cache.hooks._again import compile_graph
from s3cache.hooks._bypasses import Bypasses
from s3cache.hooks._first_calls import OutputDescription, describe_outputs, undescribed
from s3cache.hooks._rebuild import (
    LIMITS,
    LIMITS_FIELD,
    Conditions,
    Kernels,
    NotSharableError,
    conditions_of,
    described,
)
from s3cache.hooks._state import (
    AOT,
    FX,
    LEVELS,
    CompileEvents,
    CompileState,
    KeyHook,
    Lookup,
    Patches,
    Save,
    around,
    compile_ns,
    graphs_of,
)
from s3cache.records import Event
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of
from s3cache.util.snapshot import CALLS

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import (
        AOTResult,
        CompiledGraph,
        DynamoObject,
        FirstCallWrapper,
        RuntimeMetadata,
        TracingContext,
    )

logger = logger_of("saves")

_AHEAD = BypassReason("torch", "AOTInductor compiles it, for which torch has no cache")
# Components that are in the keys of code that depends on the number of threads.
_OF_THREADS = {"cpp_runtime_thread_count", "torch.num_threads"}
#: The attribute of a compiled graph that holds its FxInfo.
FX_INFO = "s3cache_fx_info"


class FxInfo(TypedDict):
    """Notes on an FX graph from its lowering to the save of its entry.

    ``late`` is true for a backward that is lowered at its first call. ``lowered`` is the digest of
    the settings at that moment, if they have one.
    """

    sees_places: bool
    late: bool
    lowered: str | None


def _unrecorded(what: str) -> NotSharableError:
    return NotSharableError("unrecorded", what)


class Compile:
    """One compile that we will save, from the lookup that missed to the next lookup."""

    def __init__(
        self,
        context: TracingContext,
        key: str,
        sources: Sequence[object],
        inputs: Sequence[object],
        *,
        of_threads: bool,  # whether the code depends on the number of threads
        was_absent: bool = False,  # no tier had an entry under the key
    ) -> None:
        import torch

        self.key, self.was_absent, self.of_threads = key, was_absent, of_threads
        self.places = storage_offsets(inputs)
        self._sources = sources
        # Sizes that are inputs: torch's entry has the guards on them.
        sizes = (value.node.expr for value in inputs if isinstance(value, torch.SymInt))
        self._symbols = frozenset(size for size in sizes if getattr(size, "is_symbol", False))
        # The numbers of AOTAutograd's guards and of guards on sizes, before and after the compile.
        self._before = _counts(context)
        self._until: tuple[int, int] | None = None
        self._dynamos = len(context.guards_context.dynamo_guards)
        self._strays = False  # whether Dynamo added guards
        # The outputs of a first call on fake tensors, if there was one.
        self.outputs: list[OutputDescription] | NotSharableError | None = None

    def end(self, context: TracingContext) -> None:
        """End the compile: guards that are added from now on belong to another graph."""
        self._until = self._until or _counts(context)

    def look(self, context: TracingContext) -> None:
        """Count Dynamo's own guards while it still has them."""
        if self._until is None:
            self._strays |= len(context.guards_context.dynamo_guards) != self._dynamos

    def added_guards(self, context: TracingContext) -> Iterator[tuple[str, list[int], list[int]]]:
        """Yield the guards that the compile has added, with the indices of their inputs."""
        if self._strays:
            raise _unrecorded("guards that Dynamo added")
        until, _ = self._until or _counts(context)
        for guard in context.guards_context.aotautograd_guards[self._before[0] : until]:
            if (description := internals.sources_of_guard(guard)) is None:
                raise _unrecorded(f"a guard of an unknown kind ({type(guard).__name__})")
            kind, *sources = description
            try:
                some, others = ([*map(self._sources.index, each)] for each in sources)
            except ValueError:
                raise _unrecorded("a guard on a value that is not an input") from None
            yield kind, some, others

    def added_sizes(self, context: TracingContext) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the added guards on sizes that torch's entry leaves out."""
        _, until = self._until or _counts(context)
        for guard in internals.shape_guards(context)[self._before[1] : until]:
            if guard.expr.free_symbols <= self._symbols:
                continue
            named = internals.named_symbols(context, guard.expr.free_symbols)
            if named is None:
                raise _unrecorded(f"a guard on a value without a name ({guard.expr})")
            yield internals.format_expression(guard.expr), named


class TorchsCompile(NamedTuple):
    """One compile that we do not save as a whole; torch saves it under ``key``, if it has one."""

    key: str | None


def _counts(context: TracingContext) -> tuple[int, int]:
    return len(context.guards_context.aotautograd_guards), len(internals.shape_guards(context))


def note_conditions(entry: AOTResult, compile_: Compile | None) -> None:
    """Store the conditions of the code in ``entry`` on it, before it is pickled."""
    context = internals.current_tracing_context.get()()
    if compile_ is None or context is None:
        raise _unrecorded("its compile was not observed")
    if CALLS.called:
        message = f"{CALLS.called} ran while torch compiled, in place of a function of torch"
        raise NotSharableError("override", message)
    infos: list[FxInfo] = []
    for graph in graphs_of(entry):
        info: FxInfo | None = getattr(graph, FX_INFO, None)
        if info is None:
            raise _unrecorded("the compile of its forward or backward was not observed")
        infos.append(info)
    if any(info["late"] and info["lowered"] is None for info in infos):
        raise _unrecorded("the settings under which its backward was lowered have no digest")
    conditions: Conditions = {
        "guards": list(compile_.added_guards(context)),
        "sizes": list(compile_.added_sizes(context)),
        "places": compile_.places if any(info["sees_places"] for info in infos) else None,
        "lowered": infos[-1]["lowered"],
        "of_threads": compile_.of_threads,
    }
    setattr(entry, CONDITIONS, conditions)


@dataclass(eq=False)
class Compiles:
    """Follows compiles by their tracing contexts, and saves their results."""

    _engine: Engine
    _state: CompileState
    _keys: KeyHook
    _kernels: Kernels
    _bypasses: Bypasses
    _events: CompileEvents
    watch_graph: Function[None] = field(init=False)  # watches the first call of a graph
    # Saved entries with code of an FX entry, by its key, until the first call of that code.
    built_from: dict[str, list[Frame]] = field(default_factory=dict, init=False)
    # Several graphs may be compiled in one context, one after the other (DDPOptimizer), and their
    # backwards later: by AOTAutograd's number, in the order of their lookups.
    contexts: weakref.WeakKeyDictionary[TracingContext, dict[int, Compile | TorchsCompile]] = field(
        default_factory=weakref.WeakKeyDictionary, init=False
    )

    # The variants of FX graphs that were saved here, by key, until a whole graph contains them.
    parts: dict[str, str] = field(default_factory=dict, init=False)
    # With ``recache``: the entries that the next save under a key replaces.
    replaced: dict[str, list[Frame]] = field(default_factory=dict, init=False)

    def install(self, patches: Patches) -> None:
        patches.install(self)
        for level in LEVELS:
            patches.wrap(level.write, self._write)

    # -- while torch compiles

    def end(self) -> None:
        """End the compiles of other graphs: a graph is about to be looked up."""
        context, compiles = self._all()
        for compile_ in compiles.values():
            if context is not None and isinstance(compile_, Compile):
                compile_.end(context)

    def begin(self, lookup: Lookup) -> None:
        """Save what torch compiles after this lookup; without a key, at the second level only."""
        context, key = internals.current_tracing_context.get()(), str(lookup.key)
        if context is None:
            return
        compiles = self.contexts.setdefault(context, {})
        if lookup.reasons:
            compiles[lookup.number] = TorchsCompile(lookup.torch_key)
            return
        try:
            compiles[lookup.number] = Compile(
                context,
                key,
                lookup.sources,
                lookup.inputs,
                of_threads=not _OF_THREADS.isdisjoint(self._keys.known(key).components),
                was_absent=lookup.entries is not None and lookup.entries.is_absent,
            )
            if CALLS.is_watching:  # Dynamo may have called a function before it was watched
                internals.fake_mode.get().cache_clear()
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            lookup.record_error(exc)
            self._bypasses.warn_of_failure(logger, "a graph will not be cached as a whole", exc)

    def is_in_torchs_entry(self) -> bool:
        """Return whether an entry of torch, for a graph without a key of ours, names the FX graph.

        torch then finds the FX graph only in its own caches.
        """
        compile_ = self._current()[1]
        return (
            isinstance(compile_, TorchsCompile)
            and compile_.key is not None
            and self._state.fx_options is None  # else the entry contains it
        )

    def force_bundling(self) -> bool:
        """Make torch bundle the current FX graph if an entry will contain it."""
        options = self._state.fx_options
        if options is not None:
            functorch = internals.functorch_config.get()
            options.enter_context(functorch.patch(bundled_autograd_cache=True))
        return options is not None

    def _all(self) -> tuple[TracingContext | None, dict[int, Compile | TorchsCompile]]:
        context = internals.current_tracing_context.get()()
        return context, {} if context is None else self.contexts.get(context, {})

    def _current(self) -> tuple[TracingContext | None, Compile | TorchsCompile | None]:
        context, compiles = self._all()
        if not compiles:
            return context, None
        # Like "3_backward": AOTAutograd's number of the graph.
        name = (getattr(context, internals.GRAPH_NAME, None) or ("",))[0].partition("_")[0]
        return context, compiles.get(int(name) if name.isdigit() else [*compiles][-1])

    def current(self) -> Compile | None:
        """Return the current compile, if it will be an entry of ours."""
        compile_ = self._current()[1]
        return compile_ if isinstance(compile_, Compile) else None

    def _compile_of(self, key: str) -> Compile | None:
        ours = [each for each in self._all()[1].values() if isinstance(each, Compile)]
        return next((each for each in reversed(ours) if each.key == key), None)

    @around(internals.compile_fx_inner)
    def _compile_graph(
        self, original: Function[CompiledGraph], gm: GraphModule, *args: object, **kwargs: object
    ) -> CompiledGraph:
        state = self._state.changed(fx_hit=None)
        with self._state.ending(), state, CALLS.compiling():
            graph = self._compile_noted(original, gm, *args, **kwargs)
            lookup = self._state.fx_hit
        if isinstance(lookup, Lookup) and (hit := lookup.hit_of(graph)) is not None:
            context, options = self._current()[0], dict(self._state.options)
            metadata, again = None if context is None else context.fw_metadata, None
            if args:
                again = partial(compile_graph, options, gm, metadata, args[1:], kwargs)
            self.watch_graph(lookup, hit, graph, again, reusing=bool(kwargs.get("is_backward")))
        return graph

    def _compile_noted(
        self, original: Function[CompiledGraph], gm: GraphModule, *args: object, **kwargs: object
    ) -> CompiledGraph:
        if internals.compiles_ahead.get():
            self._bypasses.record("fx", [_AHEAD])
            return original(gm, *args, **kwargs)
        context, compile_ = self._current()
        if context is None or compile_ is None:
            return original(gm, *args, **kwargs)
        started = time.monotonic_ns()
        info, functorch = None, internals.functorch_config.get()
        if isinstance(compile_, Compile):
            info = self._fx_info(gm, compile_, is_backward=bool(kwargs.get("is_backward")))
        elif not functorch.bundled_autograd_cache:
            return original(gm, *args, **kwargs)
        with contextlib.ExitStack() as options, self._state.changed(fx_options=options):
            # torch compiles a graph without operators only if it bundles.
            if not (internals.asks_fx_cache() and internals.count_calls.get()(gm.graph)):
                self.force_bundling()
            elif isinstance(compile_, TorchsCompile):  # torch bundles it after this
                options.enter_context(functorch.patch(bundled_autograd_cache=False))
            graph = original(gm, *args, **kwargs)
        if info is not None and isinstance(compile_, Compile):
            if not info["late"]:
                compile_.look(context)
            setattr(graph, FX_INFO, info)
        # torch sets it only if it does not bundle, and reads that of a backward here.
        if graph._time_taken_ns is None:
            graph._time_taken_ns = time.monotonic_ns() - started
        return graph

    def _fx_info(self, gm: GraphModule, compile_: Compile, *, is_backward: bool) -> FxInfo | None:
        """Return the notes on an FX graph that will be lowered; ``None`` if it cannot be saved."""
        late = is_backward and not self._state.depth
        try:
            lowered = None
            if late:
                lowered = settings_digest(
                    of_threads=compile_.of_threads, registered_version=self._keys.version_of
                )
            return {"sees_places": reads_storage_offsets(gm), "late": late, "lowered": lowered}
        except Exception as exc:  # noqa: BLE001 - the user's program goes on
            self._bypasses.warn_of_failure(logger, "a graph will not be cached as a whole", exc)
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
        if wrapper.needs_post_compile and isinstance(compile_, Compile):
            try:  # with the strides that Inductor chose: the original has set them
                compile_.outputs = describe_outputs(wrapper.out_metas, runtime_metadata)
            except NotSharableError as exc:
                compile_.outputs = exc
        return function

    # -- saves

    @around(internals.save)
    def _save(
        self, original: Function[None], key: str, entry: AOTResult, *args: object, **kwargs: object
    ) -> None:
        saving = Save(level=AOT, key=key, result=entry, is_shared=self._keys.is_shared(key))
        save = partial(original, key, entry, *args, **kwargs)
        self._run(saving, save, entry, entry.runtime_metadata)

    @around(internals.guards_expression)
    def _guards_expression(
        self, original: Function[str | None], shapes: DynamoObject, *args: object, **kwargs: object
    ) -> str | None:
        """Hide sizes of earlier calls, which ``automatic_dynamic_exclusion_guard`` adds.

        They keep a graph from being used where an earlier one fits. Its code does not depend on
        them.
        """
        excluded = getattr(shapes, "exclusion_constraints", [])
        shapes.exclusion_constraints = []
        try:
            return original(shapes, *args, **kwargs)
        finally:
            shapes.exclusion_constraints = excluded

    @around(internals.pickle_entry)
    def _pickle_entry(
        self, original: Function[bytes | None], entry: AOTResult, *args: object, **kwargs: object
    ) -> bytes | None:
        saving = self._state.current
        content = original(entry, *args, **kwargs)
        if content is None and isinstance(saving, Save) and saving.is_shared:
            what = internals.find_unpicklable_field.get()(entry) or "as a whole"
            message = f"its compiled code cannot be pickled ({what})"  # torch has logged why
            self._count_refusal(saving, "entry", internals.bypass_error.get()(message))
        return content

    @around(internals.fx_save)
    def _save_graph(
        self,
        original: Function[None],
        key: str,
        graph: CompiledGraph,
        *args: object,
        **kwargs: object,
    ) -> None:
        bound = inspect.signature(original).bind(key, graph, *args, **kwargs)
        saving = Save(level=FX, key=key, result=graph, is_shared=self._keys.is_shared(key))
        saving.in_directory = bool(bound.arguments["local"])
        if saving.is_shared:
            bound.arguments["local"] = True  # we intercept this write, for a remote alone too
            graph._fx_graph_cache_debug_lines = []  # they are in the header of our entry
        self._run(saving, partial(original, *bound.args, **bound.kwargs))

    def _run(self, saving: Save, save: Callable[[], None], *others: object) -> None:
        """Make the result and ``others`` portable and let torch save.

        After a failure, torch alone saves the result, as it is.
        """
        with self._state.entered(saving), contextlib.ExitStack() as stack:
            if saving.is_shared:
                saving.is_shared = False
                with self._refusing(saving):
                    if saving.level is AOT:
                        whole = cast("AOTResult", saving.result)
                        note_conditions(whole, self._compile_of(saving.key))
                    device = self._keys.known(saving.key).device or ""
                    if device or internals.is_in_job():  # the key does not say where it can run
                        limits = self._events.limit.ask(saving, device)
                        if limits is None:
                            raise _unrecorded("where its code can run is not known")
                        saving.limits = limits
                    setattr(saving.result, LIMITS, saving.limits.where)
                    results = *others, *graphs_of(saving.result)
                    self._events.saving.tell(saving)
                    stack.enter_context(self._kernels.hidden(*results))
                    saving.is_shared = True
            save()
            saving.raise_error(strict=self._engine.settings.strict)

    def _write(self, original: Callable[[str, bytes], None], key: str, content: bytes) -> None:
        saving = self._state.current
        # A write outside of a save comes from torch.compiler.load_cache_artifacts.
        in_directory = not isinstance(saving, Save) or saving.in_directory
        write = partial(original, key, content) if in_directory else _do_nothing
        if not isinstance(saving, Save) or not saving.is_shared:
            write()
        elif self.is_in_torchs_entry():
            write()
            self._share(saving, content, otherwise=_do_nothing)
        else:
            self._share(saving, content, otherwise=write)

    def _share(self, saving: Save, content: bytes, *, otherwise: Callable[[], object]) -> None:
        """Save the pickle that torch made, once Dynamo has accepted its frame.

        If it cannot be saved, ``otherwise`` is called.
        """
        key, name, ready = saving.key, saving.level.name, list[Frame]()
        with self._refusing(saving):
            unpickle(content)  # if this fails here, it would fail in every other process
            ready.append(decode(self._artifact(saving, content).encode(key)))
        if not ready:
            otherwise()
            return
        (entry,) = ready
        frame, compile_ = self._state.frame, self._compile_of(key)
        asked = {level.name: internals.tiers_asked(level.name).remote for level in LEVELS}
        write = partial(
            self._engine.save,
            key,
            entry,
            kind=name,
            delayed=saving.is_delayed and not self._events.is_awaited.ask(saving),
            remote=asked[name],
            once=saving.level is AOT and compile_ is not None and compile_.was_absent,
            replaces=self.replaced.pop(key, ()),
        )
        contains = asked["aot"] or not asked["fx"]
        save = partial(self._save_entry, saving, entry, write, otherwise, contains=contains)
        if frame is None:
            save()
            return
        frame.saves += [save, partial(saving.raise_error, strict=self._engine.settings.strict)]

    def _save_entry(
        self,
        saving: Save,
        entry: Frame,
        write: Callable[[], Saved | NotSaved],
        otherwise: Callable[[], object],
        *,
        contains: bool,
    ) -> None:
        """Write an entry; a whole graph that ``contains`` entries of FX graphs replaces these."""
        key, is_saved = saving.key, False
        event = internals.trace_event("s3cache.save", saving.level.name)
        with event as about, self._refusing(saving):
            saved = write()
            is_saved = isinstance(saved, Saved)
            self._events.saved.tell(saving, entry, is_saved)
            about.update(key=key, bytes=entry.size, saved=is_saved)
            if isinstance(saved, Saved):
                logger.debug("saved %s (%d bytes%s)", key, entry.size, saving.level.label)
                if saving.level is AOT or self.current() is None:  # else it is a part
                    compile_s, now = sum(compile_ns(saving.result)) / 1e9, time.time()
                    began = now - saved.elapsed_s
                    self._engine.record(Event("compile", began, compile_s, key))
                    self._engine.record(Event("save", now, saved.elapsed_s, key, entry.size))
                if saving.level is FX:
                    self.parts[key] = entry.header.variant
                else:
                    for graph in graphs_of(saving.result):
                        part = getattr(graph, "_fx_graph_cache_key", None) or ""
                        if part in self.built_from:
                            self.built_from[part].append(entry)
                        if contains and part in self.parts:
                            self._engine.contain(part, self.parts.pop(part))
        if not is_saved:
            try:
                otherwise()
            except Exception:  # as torch does when it writes there itself
                logger.info("torch's own directory cannot be written", exc_info=True)

    def _artifact(self, saving: Save, content: bytes) -> Artifact:
        """Make the artifact of a compiled graph that torch has pickled as ``content``."""
        result, key = saving.result, self._keys.known(saving.key)
        graphs, limits = graphs_of(result), saving.limits
        meta: dict[str, object] = {
            "guards": result.guards_expr,
            "relies_on": described(conditions_of(result), limits.relied),
            "times_ns": list(compile_ns(result)),
            "components": {n: [part.digest, part.value] for n, part in key.components.items()},
            "made_by": _made_by(graphs),
        }
        if limits.where is not None:
            meta[LIMITS_FIELD] = limits.where
        for more in self._events.describe.ask_all(saving):
            meta |= more
        if saving.level is AOT:
            meta["runtime"] = describe(cast("AOTResult", result))
            meta["first_call"] = self._first_call(saving)
        kernels = self._kernels.images_of(graphs)  # refuses results without sources
        sources = [internals.strip_imports(graph.source_code)[0] for graph in graphs]
        return Artifact(saving.level.name, content, kernels, meta, key.parts, sources)

    def _first_call(self, saving: Save) -> list[OutputDescription] | None:
        compile_ = self._compile_of(saving.key)
        outputs = None if compile_ is None else compile_.outputs
        if isinstance(outputs, NotSharableError):
            raise outputs
        key = self._keys.known(saving.key)
        if outputs is None and FIRST_CALL in key.components:
            raise undescribed("the outputs of its first call are not known")
        for output in outputs or ():
            if key.device and output.get("device") == key.device:
                output["device"] = key.device.partition(":")[0]  # the current one of the process
        return outputs

    @contextlib.contextmanager
    def _refusing(self, saving: Save) -> Iterator[None]:
        """Do not share the graph if the block fails; the user's program goes on."""
        try:
            yield
        except (CorruptError, NotSharableError) as exc:
            self._count_refusal(
                saving, exc.code if isinstance(exc, NotSharableError) else "entry", exc
            )
        except Exception as exc:  # noqa: BLE001 - whatever it is
            saving.record_error(exc)
            self._bypasses.warn_of_failure(logger, "a compiled graph is not shared", exc)

    def _count_refusal(self, saving: Save, code: Code, error: Exception) -> None:
        """Count and log a compiled graph that cannot be shared."""
        reasons, what = [BypassReason(code, str(error))], "a compiled graph is not shared"
        if saving.level is FX:
            self._bypasses.note(what, reasons)
            return
        self._bypasses.warn(reasons, what=what)
        self._bypasses.record("aot", reasons, key=saving.key)
        saving.record_error(error)


def _do_nothing() -> None:
    """Stand for a write that torch does not ask for."""


def _made_by(graphs: Sequence[object]) -> dict[str, str]:
    """Return the versions and devices that an entry was made with, for people to read."""
    import torch

    devices = {str(device) for graph in graphs for device in getattr(graph, "device_types", ())}
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "device": " ".join(sorted(devices)),
    }
