"""The two levels: whole graphs (AOT), and FX graphs for what the first level cannot serve.

An entry of the first level holds a graph's forward and backward. torch's own ``try_load`` and
``save`` run as they are, with their counters, trace artifacts and time-out extensions. The first
makes a key (``_keys``), goes through the entries under it, has each one's guards evaluated, and
makes a callable of the one that it takes. The second pickles the entry, records it for
``save_cache_artifacts``, and writes it to torch's directory: that write comes here.

AOTAutograd traces a graph of Dynamo's into a forward and a backward, and Inductor compiles each.
Where there is no entry of the whole, torch asks the second level for each FX graph: of graphs that
cannot be cached as a whole, of forwards without a compiled backward, of graphs that other programs
hand to Inductor. What is saved there while a whole graph is being compiled is provisional: the
entry of the whole graph supersedes it, and no compile is shared twice.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from s3cache.artifact import describe, variant_of
from s3cache.cache import Saved
from s3cache.errors import CorruptError
from s3cache.graph import FIRST_CALL, BypassReason, Code
from s3cache.hooks._compiles import note_conditions
from s3cache.hooks._conditions import (
    NotSharableError,
    add_guards,
    attach_backward,
    conditions_of,
    described,
    misfits,
)
from s3cache.hooks._keys import FxKeying, around, is_made_for_threads
from s3cache.hooks._level import Level, Lookup, Save, Shared, saves
from s3cache.records import Event
from s3cache.stats import Reason
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from torch.nn import Module

    from s3cache.torch_api.protocols import AOTConfig, AOTResult, CompiledGraph, Function


bypasses = logger_of("bypasses")


class AOTGraphs(Level["AOTResult"]):
    """Puts a cache before torch's own directory of whole graphs."""

    name = "aot"
    shared = Shared(
        internals.aot_result,
        internals.iterate_over_candidates,
        internals.write_to_local_cache,
        internals.should_use_remote_cache,
        internals.remote_cache,
        internals.uses_remote_cache,
    )

    def _graphs(self, result: AOTResult) -> list[object]:
        compiled = (result.compiled_fw, result.compiled_bw)
        return [each.result for each in compiled if each is not None]

    def _compile_ns(self, result: AOTResult) -> tuple[int, int]:
        return int(result.forward_time_taken_ns), int(result.backward_time_taken_ns)

    def _misfit(self, result: AOTResult, lookup: Lookup) -> Callable[[], list[str]] | None:
        conditions = conditions_of(result)
        if conditions is None:
            if lookup.hit is not None:  # an entry of ours
                raise CorruptError("entry", "does not say what its code relies on")
            return None
        about = conditions, lookup.inputs, lookup.sources
        if next(misfits(*about), None) is None:
            return None
        return lambda: list(misfits(*about))

    # -- lookups

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
        lookup = Lookup(level="aot", sources=config.aot_autograd_arg_pos_to_source or ())
        with self._state.entered(lookup), self._shown("s3cache.lookup") as event:
            if internals.ranks_must_agree():
                from s3cache.hooks._distributed import consensus_for

                lookup.consensus = consensus_for(internals.graph_module_of(mod), inputs)
            if self._compiles.contexts:
                self._compiles.end()
            try:
                result = original(mod, inputs, config, *args, **kwargs)
            finally:
                if lookup.consensus is not None:
                    lookup.consensus.close()
                if lookup.reasons:
                    self._bypassed(lookup, mod, event)
                else:
                    self._ended(lookup, event)
            if lookup.key and not internals.is_hit(result) and self._keys.is_shared(lookup.key):
                self._begin(lookup, config)
            self._raise_if_strict(lookup)
            return result

    def _bypassed(self, lookup: Lookup, mod: Module, event: dict[str, object]) -> None:
        if lookup.entries is not None:
            lookup.entries.close()
        codes = " ".join(dict.fromkeys(reason.code for reason in lookup.reasons))
        event.update(outcome="bypass", reason=codes)
        self._bypasses.record("aot", lookup.reasons, internals.graph_module_of(mod))
        self._bypasses.warn(lookup.reasons, lookup.error)

    def _begin(self, lookup: Lookup, config: AOTConfig) -> None:
        """Have what is compiled after this miss end in an entry."""
        key = str(lookup.key)
        of_threads = is_made_for_threads(self._keys.known(key))
        try:
            self._compiles.begin(key, config, lookup.inputs, of_threads=of_threads)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            lookup.record_error(exc)
            self._warn(saves, "a graph will not be cached as a whole", exc)

    @around(internals.evaluate_guards)
    def _evaluate_guards(self, original: Function[bool], *args: object, **kwargs: object) -> bool:
        try:
            return original(*args, **kwargs)
        except Exception as exc:
            lookup = self._current(Lookup)
            if lookup is None or lookup.hit is None:
                raise
            lookup.reject(exc)
            return False

    @around(internals.wrap_post_compile)
    def _wrap_post_compile(
        self, original: Function[object], entry: AOTResult, *args: object, **kwargs: object
    ) -> object:
        lookup = self._current(Lookup)
        if lookup is None:
            return original(entry, *args, **kwargs)
        hit = lookup.hit_of(entry)
        self._confirm_with_ranks(lookup)
        with _rolled_back_on_error():
            try:
                if hit is not None and internals.is_first_call_fake():
                    from s3cache.hooks._distributed import fake_first_call

                    fake_first_call(entry, hit.entry.header.meta.get("first_call"))
                # What is rebuilt behaves on later calls as what is compiled here.
                conditions = conditions_of(entry)
                if conditions is not None:
                    attach_backward(entry, conditions, self._state, self._keys.version_of)
                function = original(entry, *args, **kwargs)
                if conditions is not None:
                    add_guards(conditions, lookup.sources)
            except Exception as exc:
                if hit is None:
                    raise
                lookup.reject(exc)
                # A miss to torch: it compiles, and what it saves replaces the entry.
                raise internals.miss_error.get()(f"s3cache: {exc}") from exc
            self._confirm_with_ranks(lookup)
        if hit is not None:
            self._accept(lookup, hit, entry)
        return function

    def _confirm_with_ranks(self, lookup: Lookup) -> None:
        """Go on if all other ranks hit too, so far."""
        if lookup.consensus is not None and not lookup.consensus.all_hit():
            if lookup.entries is not None:
                lookup.entries.force_miss(Reason.RANKS)
            raise internals.miss_error.get()("s3cache: another rank has missed")

    # -- saves

    @around(internals.save)
    def _save(
        self, original: Function[None], key: str, entry: AOTResult, *args: object, **kwargs: object
    ) -> None:
        saving = Save(level="aot", key=key, result=entry, is_shared=self._keys.is_shared(key))
        save = partial(original, key, entry, *args, **kwargs)
        self._run(saving, save, entry, entry.runtime_metadata)

    def _prepare(self, saving: Save[AOTResult]) -> None:
        noted = note_conditions(saving.result, self._compiles.compile_of(saving.key))
        saving.relies_on = described(noted)

    @around(internals.pickle_entry)
    def _pickle_entry(
        self, original: Function[bytes | None], entry: AOTResult, *args: object, **kwargs: object
    ) -> bytes | None:
        saving: Save[AOTResult] | None = self._current(Save)
        content = original(entry, *args, **kwargs)
        if content is None and saving is not None and saving.is_shared:  # torch has logged why
            field = internals.find_unpicklable_field.get()(entry) or "as a whole"
            message = f"what it was compiled to cannot be pickled ({field})"
            self._refused("entry", internals.bypass_error.get()(message))
        return content

    def _described(self, saving: Save[AOTResult]) -> dict[str, object]:
        compile_ = self._compiles.compile_of(saving.key)
        first_call = None if compile_ is None else compile_.outputs
        if isinstance(first_call, NotSharableError):
            raise first_call
        if first_call is None and FIRST_CALL in self._keys.known(saving.key).components:
            raise NotSharableError(
                "fakify-first-call", "torch has not said what its first call returns"
            )
        return {"runtime": describe(saving.result), "first_call": first_call}

    def _saved(self, saving: Save[AOTResult], saved: Saved, size: int) -> None:
        compile_s = sum(self._compile_ns(saving.result)) / 1e9
        now, elapsed_s = time.time(), saved.elapsed_s
        self._engine.record(Event("compile", now - elapsed_s, compile_s, saving.key))
        self._engine.record(Event("save", now, elapsed_s, saving.key, size))
        if not internals.tiers_asked("aot").remote and internals.tiers_asked("fx").remote:
            return
        for graph in self._graphs(saving.result):  # nothing needs their own entries any more
            if isinstance(graph, internals.compiled_graph.get()) and graph._fx_graph_cache_key:
                self._engine.supersede(graph._fx_graph_cache_key, variant_of(graph.guards_expr))

    def _refused(self, code: Code, error: Exception) -> None:
        reasons = [BypassReason(code, str(error))]
        self._bypasses.warn(reasons, what="a compiled graph is not shared")
        current = self._state.current
        if current is not None:
            self._bypasses.record("aot", reasons, key=current.key or "")
            current.record_error(error)


@contextlib.contextmanager
def _rolled_back_on_error() -> Iterator[None]:
    """Take back what a half rebuilt callable has added to the rest of the compile."""
    context = internals.current_tracing_context.get()()
    strides = None if context is None else context.output_strides
    before = None if strides is None else list(strides)
    guards = None if context is None else list(context.guards_context.aotautograd_guards)
    try:
        yield
    except Exception:
        if context is not None and guards is not None:
            context.guards_context.aotautograd_guards[:] = guards
        if strides is not None and before is not None:
            strides[:] = before
        raise


# -- the second level

Made: TypeAlias = tuple[object, object]
Found: TypeAlias = tuple["CompiledGraph | None", dict[str, object]]


class FxGraphs(Level["CompiledGraph"]):
    """Puts a cache before torch's own directory of FX graphs."""

    name = "fx"
    label = ", second level"

    shared = Shared(
        internals.compiled_graph,
        internals.fx_candidates,
        internals.fx_write_to_local_cache,
        internals.should_use_remote_fx_here,
        internals.fx_remote_cache,
        internals.should_use_remote_fx_cache,
    )

    def _graphs(self, result: CompiledGraph) -> list[object]:
        return [result]

    def _compile_ns(self, result: CompiledGraph) -> tuple[int, int]:
        return int(result._time_taken_ns or 0), 0

    def _is_provisional(self) -> bool:
        return self._compiles.is_compiling_entry()

    def _refused(self, code: Code, error: Exception) -> None:
        self._engine.count_bypass([code], "fx")
        bypasses.info("a compiled graph is not shared at the second level: %s", error)

    @around(internals.fx_prepare_key)
    def _prepare_key(self, original: Function[Made], *args: object, **kwargs: object) -> Made:
        with self._state.entered(FxKeying()) as call, self._keys.described_passes():
            made = original(*args, **kwargs)
        if made[0] is None or call.reasons:
            self._bypassed(call)
        if made[0] is None and self._compiles.force_bundling():
            return None, None  # torch would leave out what an entry of the whole graph needs
        return made

    def _bypassed(self, call: FxKeying) -> None:
        if call.reasons:
            self._bypasses.record("fx", call.reasons)
        codes: list[Code] = [reason.code for reason in call.reasons] or ["torch"]
        with self._shown("s3cache.lookup") as event:
            event.update(outcome="bypass", reason=" ".join(dict.fromkeys(codes)))
        self._engine.count_bypass(codes, "fx")
        self._raise_if_strict(call)
        if call.error is not None:
            self._warn(bypasses, "a graph has no key at the second level", call.error)
        else:
            why = "; ".join(map(str, call.reasons)) or "torch does not cache it"
            bypasses.info("a graph is not cached at the second level: %s", why)

    @around(internals.fx_lookup)
    def _lookup_graph(self, original: Function[Found], *args: object, **kwargs: object) -> Found:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        lookup = Lookup(level="fx")
        lookup.key, lookup.inputs = given["key"], given.get("example_inputs", ())
        if not self._keys.is_shared(lookup.key):
            return original(*args, **kwargs)
        with self._state.entered(lookup), self._shown("s3cache.lookup") as event:
            try:
                if internals.ranks_must_agree():  # they have agreed to compile the whole graph
                    lookup.entries = self._engine.candidates(str(lookup.key), "fx")
                    lookup.entries.force_miss(Reason.RANKS)
                    return None, {}
                graph, info = original(*args, **kwargs)
                if graph is not None and (hit := lookup.hit_of(graph)) is not None:
                    self._accept(lookup, hit, graph)
            except Exception as exc:
                if lookup.hit is None:
                    raise
                lookup.reject(exc)
                graph, info = None, {}
            finally:
                self._ended(lookup, event, of_whole=self._compiles.is_compiling_entry())
            self._raise_if_strict(lookup)
            return graph, info

    @around(internals.fx_save)
    def _save_graph(
        self,
        original: Function[None],
        key: str,
        graph: CompiledGraph,
        *args: object,
        **kwargs: object,
    ) -> None:
        given = inspect.signature(original).bind(key, graph, *args, **kwargs)
        is_shared, in_directory = self._keys.is_shared(key), bool(given.arguments["local"])
        saving = Save(
            level="fx", key=key, result=graph, is_shared=is_shared, in_directory=in_directory
        )
        if is_shared:
            given.arguments["local"] = True  # that write comes here, for the remote alone too
            graph._fx_graph_cache_debug_lines = []  # the header of the entry has them
        self._run(saving, partial(original, *given.args, **given.kwargs))
