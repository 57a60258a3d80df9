"""Lookups at the two levels of torch's caches: whole graphs (AOT), and FX graphs.

AOTAutograd traces a graph from Dynamo into a forward and a backward, and Inductor compiles both.
An entry of the first level contains both. Without one, torch looks each FX graph up at the second
level: graphs that cannot be cached as a whole, forwards without a compiled backward, graphs that
other programs pass to Inductor.

torch's own lookups run unchanged. They compute a key and go through the entries under it: each is
unpickled and its guards are evaluated. torch makes a callable of the first that fits.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from s3cache.artifact import Artifact, section_of, unpickle
from s3cache.cache import Engine, Hit
from s3cache.errors import ConfigError, CorruptError, MissError, Reason
from s3cache.graph import BypassReason, process_bypass_reasons, unwrap_patch
from s3cache.hooks._again import lower_backward
from s3cache.hooks._bypasses import Bypasses
from s3cache.hooks._compiles import Compiles
from s3cache.hooks._first_calls import fake_first_call, heal
from s3cache.hooks._rebuild import (
    LIMITS,
    LIMITS_FIELD,
    FirstCall,
    add_guards,
    attach_backward,
    conditions_of,
    failing_guards,
    misfits,
)
from s3cache.hooks._state import (
    AOT,
    FX,
    LEVELS,
    Candidate,
    CompileEvents,
    CompileState,
    FxKeying,
    KeyHook,
    Level,
    Lookup,
    Patches,
    Result,
    around,
    compile_ns,
    graphs_of,
    users_line,
)
from s3cache.records import Record
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from torch.nn import Module

    from s3cache.insight import Explanation
    from s3cache.torch_api.protocols import AOTConfig, AOTResult, CompiledGraph

logger = logger_of("lookups")

#: Why a graph with a key is not looked up: see ``KeyHook.is_shared``.
_OF_TORCH = BypassReason("torch", "it is compiled inside torch's fresh_cache(), or has another key")
# How many rejected entries of a key are recorded.
_MAX_REJECTED = 16


@dataclass(eq=False)
class Lookups:
    """Looks entries up before torch searches its own directories."""

    _engine: Engine
    _state: CompileState
    _keys: KeyHook
    _bypasses: Bypasses
    _events: CompileEvents
    compiles: Compiles

    def install(self, patches: Patches) -> None:
        self.compiles.watch_graph = self.watch_graph
        patches.install(self)
        for level in LEVELS:
            patches.wrap(level.candidates, partial(self._candidates, level))
            patches.wrap(level.asks_remote, partial(self._asks_remote, level))
            patches.wrap(level.remote_cache, partial(_only_if_asked, level))

    def _asks_remote(self, level: Level, original: Callable[[], bool]) -> bool:
        ours = self._engine.has_remote and internals.tiers_asked(level.name).remote
        return original() or ours  # call it always: torch logs in it

    def _current(self, level: Level) -> Lookup | None:
        """Return torch's current lookup at this level, if any."""
        call = self._state.current
        return call if isinstance(call, Lookup) and call.level is level else None

    # -- whole graphs

    @around(internals.try_load)
    def _try_load(
        self,
        original: Function[object],
        mod: Module,
        inputs: Sequence[object],
        config: AOTConfig,
        *args: object,
        **kwargs: object,
    ) -> object:
        sources = config.aot_autograd_arg_pos_to_source or ()
        bound = config.num_params_buffers
        lookup = Lookup(level=AOT, sources=sources, bound=bound, number=config.aot_id)
        with (
            self._state.entered(lookup),
            internals.trace_event("s3cache.lookup", "aot") as lookup.about,
        ):
            gm = internals.graph_module_of(mod)
            if self.compiles.contexts:  # a hit alone needs no call
                self.compiles.end()
            if self._state.frame is not None:
                self._state.frame.save()
            try:
                with contextlib.ExitStack() as stack:
                    if internals.hits_need_agreement():
                        stack.enter_context(self._events.looking_up.around(lookup, gm, inputs))
                    result = original(mod, inputs, config, *args, **kwargs)
            finally:
                if lookup.reasons:
                    lookup.about.update(outcome="bypass", reason=lookup.codes)
                    self._bypasses.record("aot", lookup.reasons, gm)
                    self._bypasses.warn(lookup.reasons, lookup.error)
                elif self._keys.is_shared(lookup.key):
                    self._record_outcome(lookup)
                else:
                    self._bypasses.record("aot", [_OF_TORCH], gm)
            self._events.looked_up.tell(lookup)
            missed = not internals.is_hit(result) and self._keys.is_shared(lookup.key)
            if lookup.reasons or missed:
                self.compiles.begin(lookup)
            self._raise_of(lookup)
            if lookup.first is not None:
                for part in result if isinstance(result, tuple) else (result,):
                    if getattr(part, "compiled_fn", None) is lookup.first:
                        lookup.holder = part
            return result

    @around(internals.should_use_local_cache)
    def _should_use_local_cache(self, original: Callable[[], bool]) -> bool:
        """Record a graph that torch does not look up because its caches are off."""
        answer = original()
        if not (answer or any(internals.tiers_asked("aot"))):
            with contextlib.suppress(Exception):  # a failed note must not end the program
                self._bypasses.record("aot", [*process_bypass_reasons()])
        return answer

    @contextlib.contextmanager
    def searching(self, lookup: Lookup) -> Iterator[Iterator[Candidate]]:
        """Search the entries under a key that torch did not compute here, as if it asked."""
        self._keys.know(str(lookup.key))
        with (
            self._state.entered(lookup),
            internals.trace_event("s3cache.lookup", "aot") as lookup.about,
        ):
            try:
                yield self._entries(lookup)
            finally:
                self._record_outcome(lookup)
                self._raise_of(lookup)

    def make_callable(self, result: AOTResult, *args: object) -> Function[object]:
        """Make a callable of the current entry, as torch does."""
        original = cast("Function[object]", unwrap_patch(internals.wrap_post_compile.get()))
        return cast("Function[object]", self._wrap_post_compile(original, result, *args))

    @around(internals.evaluate_guards)
    def _evaluate_guards(self, original: Function[bool], *args: object, **kwargs: object) -> bool:
        try:
            return original(*args, **kwargs)
        except Exception as exc:
            lookup = self._current(AOT)
            if lookup is None or lookup.hit is None:
                raise
            lookup.reject(exc)
            return False

    @around(internals.wrap_post_compile)
    def _wrap_post_compile(
        self, original: Function[object], entry: AOTResult, *args: object, **kwargs: object
    ) -> object:
        lookup = self._current(AOT)
        if lookup is None:
            return original(entry, *args, **kwargs)
        hit = lookup.hit_of(entry)
        self._check_barred(lookup)
        with _rolled_back_on_error():
            try:
                if hit is not None and internals.is_first_call_fake():
                    fake_first_call(entry, hit.entry.header.meta.get("first_call"))
                # A rebuilt callable must behave like one that was compiled here.
                conditions = conditions_of(entry)
                if conditions is not None:
                    lookup.donates = bool(entry.runtime_metadata.bw_donated_idxs)
                    attach_backward(
                        entry, conditions, self._state, self._keys.version_of, lookup.as_before
                    )
                function = original(entry, *args, **kwargs)
                if conditions is not None:
                    add_guards(conditions, lookup.sources)
            except Exception as exc:
                if hit is None:
                    raise
                lookup.reject(exc)
                # For torch this is a miss: it compiles, and its save replaces the entry.
                raise internals.miss_error.get()(f"s3cache: {exc}") from exc
            self._check_barred(lookup)
        if hit is not None:
            self._accept(lookup, hit, entry)
            function = self._watched(lookup, hit, entry, cast("Function[object]", function))
        return function

    def _why_barred(self, lookup: Lookup) -> Reason | None:
        """Return why no entry may be used.

        If a hit depends on other processes, and no feature asks them, every lookup misses.
        """
        if not internals.hits_need_agreement():
            return None
        reason = self._events.barred.ask(lookup)
        return Reason.DISABLED if reason is None and not self._events.barred else reason

    def _check_barred(self, lookup: Lookup) -> None:
        """Raise torch's miss error if no entry may be used."""
        if (reason := self._why_barred(lookup)) is not None:
            if lookup.entries is not None:
                lookup.entries.force_miss(reason)
            raise internals.miss_error.get()(f"s3cache: {reason}")

    def _watched(
        self, lookup: Lookup, hit: Hit, entry: AOTResult, function: Function[object]
    ) -> Function[object]:
        """Return the callable of an entry for its first call, and watch that of its backward."""
        metadata, compiler = entry.runtime_metadata, self._state.backward_compiler
        if entry.compiled_bw is not None:
            again = None
            if entry.serialized_bw_module is not None:
                again = partial(lower_backward, entry, compiler)
            donated = bool(metadata.bw_donated_idxs) or lookup.donates
            self.watch_graph(lookup, hit, entry.compiled_bw.result, again, reusing=donated)
        infos = [*enumerate(metadata.input_info)]
        mutated = [i for i, info in infos if info.mutates_data or info.mutates_metadata]
        call = self._first_call(lookup, hit, graphs_of(entry))(
            again=self._state.again,
            # Wrappers may change the numbers of inputs.
            mutated=None if mutated and entry.dispatch_wrappers else mutated,
            effects=bool(metadata.tokens),
        )

        def finish(code: Function[object]) -> None:
            lookup.first = None
            if lookup.holder is not None:
                lookup.holder.compiled_fn = code

        lookup.first = call.watched(function, finish)
        return cast("Function[object]", lookup.first)

    def watch_graph(
        self,
        lookup: Lookup,
        hit: Hit,
        graph: CompiledGraph,
        again: Callable[[Sequence[object]], Function[object]] | None,
        *,
        reusing: bool,
    ) -> None:
        """Watch the first call of a loaded graph; then it is called directly."""
        function = getattr(graph, internals.CALLABLE, None)
        if function is None:
            return
        call = self._first_call(lookup, hit, [graph])(
            again=again,
            mutated=[*graph.mutated_input_idxs],
            reusing=graph.source_code if reusing else "",
        )

        def finish(code: Function[object]) -> None:
            setattr(graph, internals.CALLABLE, code)
            if lookup.level is FX:
                self.compiles.built_from.pop(str(lookup.key), None)

        if lookup.level is FX:
            call.built = self.compiles.built_from.setdefault(str(lookup.key), [])
        setattr(graph, internals.CALLABLE, call.watched(function, finish))

    def _first_call(
        self, lookup: Lookup, hit: Hit, graphs: Sequence[CompiledGraph]
    ) -> partial[FirstCall]:
        return partial(
            FirstCall,
            engine=self._engine,
            entry=hit.entry,
            take_back=partial(self._take_back, lookup),
            sources=[getattr(graph, "source_code", "") for graph in graphs],
            code=self._state.caller or internals.code_in_dynamo(),
            heal=heal,
        )

    def _take_back(self, lookup: Lookup, why: str) -> None:
        """Count a hit as a miss: its code raised at its first call."""
        if lookup.entries is not None and lookup.entries.take_back():
            self._engine.count_time_saved(-lookup.saved_s)
            lookup.saved_s = 0.0
            lookup.notes.clear()
            lookup.rejected.append(lambda: [f"raised at its first call: {why}"])
            self._record_outcome(lookup)

    @around(internals.should_bundle, internals.should_bundle_compiled)
    def _should_bundle(self, asked: Callable[[], bool]) -> bool:
        # A hit alone has no context, and makes no call.
        is_ours = bool(self.compiles.contexts) and self.compiles.current() is not None
        return is_ours or asked()

    # -- FX graphs

    @around(internals.fx_prepare_key)
    def _prepare_key(
        self, original: Function[tuple[object, object]], *args: object, **kwargs: object
    ) -> tuple[object, object]:
        with self._state.entered(FxKeying()) as call, self._keys.described_passes():
            prepared = original(*args, **kwargs)
        if prepared[0] is None or call.reasons:
            if not call.reasons:
                call.reasons = (BypassReason("torch", "torch does not cache it"),)
            self._bypasses.record("fx", call.reasons)
            with internals.trace_event("s3cache.lookup", "fx") as about:
                about.update(outcome="bypass", reason=call.codes)
            self._bypasses.note("a graph is not cached", call.reasons, call.error)
            call.raise_error(strict=self._engine.settings.strict)
        if prepared[0] is None:
            self._refuse_compile()
        if prepared[0] is None and self.compiles.force_bundling():
            return None, None  # else torch would drop parts that the entry of the graph needs
        return prepared

    @around(internals.fx_lookup)
    def _lookup_graph(
        self,
        original: Function[tuple[CompiledGraph | None, dict[str, object]]],
        *args: object,
        **kwargs: object,
    ) -> tuple[CompiledGraph | None, dict[str, object]]:
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        lookup = Lookup(level=FX, key=arguments["key"], inputs=arguments.get("example_inputs", ()))
        if not self._keys.is_shared(lookup.key):
            result = original(*args, **kwargs)
            if result[0] is None:
                self._refuse_compile()
            return result
        with (
            self._state.entered(lookup),
            internals.trace_event("s3cache.lookup", "fx") as lookup.about,
        ):
            try:
                graph, info = original(*args, **kwargs)
                if graph is not None and (hit := lookup.hit_of(graph)) is not None:
                    self._accept(lookup, hit, graph)
                    self._state.fx_hit = lookup
                    if arguments.get("local") and self.compiles.is_in_torchs_entry():
                        self._keep_for_torch(hit, str(lookup.key))
            except Exception as exc:
                if lookup.hit is None:
                    raise
                lookup.reject(exc)
                graph, info = None, {}
            finally:
                self._record_outcome(lookup, of_whole=self.compiles.current() is not None)
            self._raise_of(lookup)
            if graph is None:
                self._refuse_compile()
            return graph, info

    def _keep_for_torch(self, hit: Hit, key: str) -> None:
        """Write an FX graph to torch's directory, unless its code fits elsewhere only."""
        limits = hit.entry.header.meta.get(LIMITS_FIELD)
        if limits is None or self._events.fits.ask(limits) == "":
            try:
                content = bytes(section_of(hit.entry, "fx", "entry"))
                internals.fx_write_to_local_cache.get()(key, content)
            except Exception as exc:  # noqa: BLE001 - torch compiles the graph again next time
                self._bypasses.warn_of_failure(logger, "torch's own entry will miss", exc)

    def _refuse_compile(self) -> None:
        """Raise MissError with the explanation of the last miss, if ``on_miss`` is ``error``."""
        if self._engine.settings.on_miss != "error":
            return
        from s3cache.insight import explain

        what = "a graph without a record"
        with contextlib.suppress(ConfigError):  # nothing is recorded
            whole: Explanation | None = None
            for each in explain().explanations:
                whole = each if each.record.kind == "aot" else whole
                # Below a whole graph that missed, it says nothing new.
                cause = each if whole is None or whole.record.outcome == "bypass" else whole
                what = " ".join(repr(cause).split())
        raise MissError(f"on_miss is error, but this graph would be compiled: {what}")

    def _raise_of(self, lookup: Lookup) -> None:
        """Raise the error of a lookup in strict mode, or why a feature refuses its hit."""
        lookup.raise_error(strict=self._engine.settings.strict)
        if lookup.refused:
            raise MissError(f"on_miss is error, but {lookup.refused}")

    # -- both

    def _candidates(
        self,
        level: Level,
        original: Function[Iterator[Candidate]],
        cls: type,
        *args: object,
        **kwargs: object,
    ) -> Iterator[Candidate]:
        lookup = self._current(level)
        is_shared = lookup is not None and self._keys.is_shared(lookup.key)
        if lookup is not None:
            if is_shared:
                yield from self._entries(lookup)
            lookup.withdraw()
        if self._engine.policy.level == "require":
            return  # torch's own entries are not signed
        if lookup is not None and level is FX and self._why_barred(lookup) is not None:
            return
        for candidate in original(cls, *args, **kwargs):
            limits = getattr(candidate[0], LIMITS, None)
            if is_shared and not hasattr(candidate[0], LIMITS):
                continue  # its conditions could not be recorded
            if lookup is not None and limits is not None:
                why = self._events.fits.ask(limits)
                if why != "":
                    lookup.reject_unread(why)
                    continue
            if lookup is None or not any(_misfits(lookup, candidate[0])()):
                yield candidate

    def _entries(self, lookup: Lookup) -> Iterator[Candidate]:
        level = lookup.level
        try:
            asked = internals.tiers_asked(level.name)
            lookup.entries = self._engine.candidates(
                str(lookup.key),
                level.name,
                **asked._asdict(),
                retry=partial(self._events.missed.ask, lookup) if self._events.missed else None,
                replaced=True,
            )
            if level is FX and (reason := self._why_barred(lookup)) is not None:
                lookup.entries.force_miss(reason)
                return
            for hit in lookup.entries:
                lookup.hit = hit
                try:
                    content = bytes(section_of(hit.entry, level.name, "entry"))
                    limits = hit.entry.header.meta.get(LIMITS_FIELD)
                    load: Callable[[], object] | None = partial(unpickle, content)
                    if limits is not None:
                        load = self._events.load.ask(limits, content)
                    loaded = None if load is None else load()
                    if loaded is None or isinstance(loaded, str):
                        lookup.reject_unread(loaded)
                        continue
                    result = cast("Result", loaded)
                    if not isinstance(result, level.result.get()):
                        raise CorruptError("entry", f"contains a {type(result).__name__}")
                    why = _misfits(lookup, result)
                    # torch must rebuild it from the kernels of this entry only.
                    lookup.result, lookup.modules = result, {}
                    lookup.kernels = Artifact.kernels_of(hit.entry)
                    lookup.code_of = Artifact.codes_of(hit.entry)
                    fits = not any(why())
                except Exception as exc:  # noqa: BLE001 - unpickling may raise anything
                    lookup.reject(exc)
                    continue
                if not fits:
                    lookup.rejected.append(why)
                    continue
                if self._engine.settings.recache:
                    self._replace_later(lookup, result)
                    continue
                yield result, content, hit.tier == "local"
                if lookup.hit is not None:  # torch asks for another one
                    guards = result.guards_expr or ""
                    lookup.rejected.append(partial(failing_guards, guards, lookup.inputs))
        except Exception as exc:  # noqa: BLE001 - the user's program must go on
            lookup.record_error(exc)
            self._bypasses.warn_of_failure(logger, "a lookup failed and counts as a miss", exc)

    def _replace_later(self, lookup: Lookup, result: Result) -> None:
        """Let the next save under the key replace the current entry, if it would be used here."""
        hit, guards = lookup.hit, result.guards_expr
        if hit is not None and not (guards and failing_guards(guards, lookup.inputs)):
            self.compiles.replaced.setdefault(str(lookup.key), []).append(hit.entry)
        lookup.withdraw()

    def _accept(self, lookup: Lookup, hit: Hit, result: Result) -> None:
        """Count a hit once torch has made a callable of it."""
        assert lookup.entries is not None
        lookup.entries.accept(hit)
        self._events.hit.tell(lookup, hit, result)
        lookup.saved_s = saved_s = sum(compile_ns(result)) / 1e9
        self._engine.count_time_saved(saved_s)
        where = f"{hit.tier}{lookup.level.label}"
        logger.info("hit %s (%s), %.1f s of compiling saved", lookup.key, where, saved_s)

    def _record_outcome(self, lookup: Lookup, *, of_whole: bool = False) -> None:
        """Count and record the outcome of a lookup, if torch asked for entries."""
        if lookup.entries is None:
            return
        outcome, key = lookup.entries.close(), str(lookup.key)
        if is_hit := isinstance(outcome, Hit):
            name, reason = "hit", str(outcome.tier)
        else:
            name, reason = "miss", str(outcome.reason)
            logger.debug("miss %s (%s%s)", key, reason, lookup.level.label)
        lookup.about.update(key=key, outcome=name, reason=reason)
        if not self._engine.settings.record:
            return
        try:
            remembered = self._keys.known(key)
            record = Record(
                kind=lookup.level.name,
                outcome=name,
                reason=reason,
                key=key,
                time=time.time(),
                elapsed_s=outcome.elapsed_s,
                saved_s=lookup.saved_s,
                notes={**lookup.notes},
                where=users_line(),
                of_whole=of_whole,
                rejected=() if is_hit else tuple(map(_in_words, lookup.rejected[:_MAX_REJECTED])),
                components={n: (p.digest, p.value) for n, p in remembered.components.items()},
                parts={} if is_hit else remembered.parts,
            )
            self._engine.record(record)
        except Exception as exc:  # noqa: BLE001 - a failed record must not end the program
            self._bypasses.warn_of_failure(logger, "a lookup is not recorded", exc)


def _only_if_asked(level: Level, original: Callable[[], object]) -> object:
    """Return torch's own remote cache if its options enable it."""
    return original() if level.uses_torchs_remote.get()() else None


def _misfits(lookup: Lookup, result: Result) -> Callable[[], Iterable[str]]:
    """Return a function that yields why ``result`` does not fit, beyond torch's own guards.

    Raises:
        CorruptError: ``result`` can never be used.
    """
    conditions = conditions_of(result) if lookup.level is AOT else None
    if conditions is not None:
        return partial(misfits, conditions, lookup.inputs, lookup.sources)
    if lookup.level is AOT and lookup.hit is not None:  # our own entry
        raise CorruptError("entry", "has no conditions")
    return tuple


@contextlib.contextmanager
def _rolled_back_on_error() -> Iterator[None]:
    """On an error, remove what a partly rebuilt callable has added to the compile."""
    context = internals.current_tracing_context.get()()
    if context is None:
        yield
        return
    added_to = context.output_strides, context.guards_context.aotautograd_guards
    lists = [values for values in added_to if values is not None]
    before = [[*values] for values in lists]
    try:
        yield
    except Exception:
        for values, former in zip(lists, before, strict=True):
            values[:] = former
        raise


def _in_words(why: Callable[[], Iterable[str]]) -> str:
    text = ""
    with contextlib.suppress(Exception):  # guarded values may not exist here
        text = "; ".join(why())
    return text or "its conditions do not hold"
