"""The AOT level: whole graphs, forward and backward in one entry.

torch's own ``try_load`` and ``save`` run as they are, with their counters, trace artifacts and
time-out extensions. The first makes a key (``_keys``), goes through the entries under it, has each
one's guards evaluated, and makes a callable of the one that it takes. The second pickles the entry,
records it for ``save_cache_artifacts``, and writes it to torch's directory: that write comes here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from s3cache.artifact import Artifact, describe, packed, variant_of
from s3cache.cache import Saved
from s3cache.errors import CorruptError
from s3cache.graph import FIRST_CALL, BypassReason, Code
from s3cache.hooks._conditions import (
    NotSharableError,
    add_guards,
    conditions_hold,
    conditions_of,
    described,
    note_conditions,
)
from s3cache.hooks._keys import is_made_for_threads
from s3cache.hooks._level import Level, Lookup, Save, saves
from s3cache.hooks._misfits import failing_conditions
from s3cache.hooks._state import Patches
from s3cache.stats import Reason
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.nn import Module

    from s3cache.hooks._distributed import RankConsensus
    from s3cache.torch_api.protocols import AOTConfig, AOTResult, Function


class AOTLookup(Lookup):
    """One call of ``try_load``.

    Attributes:
        sources: where Dynamo takes each input from.
    """

    def __init__(self, mod: object, inputs: object, config: AOTConfig) -> None:
        super().__init__(level="aot")
        self.config = config
        self.sources: Sequence[object] = config.aot_autograd_arg_pos_to_source or ()
        self._consensus: RankConsensus | None = None
        if internals.ranks_must_agree():
            from s3cache.hooks._distributed import consensus_for

            gm = internals.graph_module_of(cast("Module", mod))
            self._consensus = consensus_for(gm, cast("Sequence[object]", inputs))

    def confirm_with_ranks(self) -> None:
        """Go on if all other ranks hit too, so far.

        Raises:
            Exception: a miss to torch, as one of them does not.
        """
        if self._consensus is not None and not self._consensus.all_hit():
            if self.entries is not None:
                self.entries.force_miss(Reason.RANKS)
            raise internals.miss_error.get()("s3cache: another rank has missed")

    def close(self) -> None:
        """Count the outcome if torch asked for entries, and tell the other ranks."""
        if self._consensus is not None:
            self._consensus.close()
        if self.entries is not None:
            self.entries.close()


class AOTGraphs(Level["AOTResult"]):
    """Puts a cache before torch's own directory of whole graphs."""

    name = "aot"

    def install(self, patches: Patches) -> None:
        """Replace what looks an entry up, checks it, makes a callable of it, and saves one."""
        self._install(
            patches,
            candidates=internals.iterate_over_candidates,
            write=internals.write_to_local_cache,
            asks_remote=internals.should_use_remote_cache,
            remote_cache=internals.remote_cache,
            uses_torchs_remote=internals.uses_remote_cache,
        )
        patches.wrap(internals.try_load, self._try_load)
        patches.wrap(internals.evaluate_guards, self._evaluate_guards)
        patches.wrap(internals.wrap_post_compile, self._wrap_post_compile)
        patches.wrap(internals.save, self._save)
        patches.wrap(internals.pickle_entry, self._pickle_entry)

    def _type(self) -> type[AOTResult]:
        return internals.aot_result.get()

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
        if conditions_hold(conditions, lookup.inputs):
            return None
        sources = cast("AOTLookup", lookup).sources
        return partial(failing_conditions, conditions, lookup.inputs, sources)

    # -- lookups

    def _try_load(self, original: Function[object], *args: object, **kwargs: object) -> object:
        lookup = AOTLookup(args[0], args[1], cast("AOTConfig", args[2]))
        with self._looking_up(lookup) as event:
            self._compiles.end()
            try:
                result = original(*args, **kwargs)
            finally:
                lookup.close()
                if lookup.reasons:
                    self._bypassed(lookup, cast("Module", args[0]), event)
                else:
                    self._ended(lookup, event)
            if lookup.key and not internals.is_hit(result) and self._keys.is_shared(lookup.key):
                self._begin(lookup)
            self._raise_if_strict(lookup)
            return result

    def _bypassed(self, lookup: Lookup, mod: Module, event: dict[str, object]) -> None:
        codes = " ".join(dict.fromkeys(reason.code for reason in lookup.reasons))
        event.update(level="aot", outcome="bypass", reason=codes)
        self._log.bypassed("aot", lookup.reasons, internals.graph_module_of(mod))
        self._bypasses.warn(lookup.reasons, lookup.error)

    def _begin(self, lookup: AOTLookup) -> None:
        """Have what is compiled after this miss end in an entry."""
        key = str(lookup.key)
        of_threads = is_made_for_threads(self._keys.known(key))
        try:
            self._compiles.begin(key, lookup.config, lookup.inputs, of_threads=of_threads)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            lookup.record_error(exc)
            self._warn(saves, "a graph will not be cached as a whole", exc)

    def _evaluate_guards(self, original: Function[bool], *args: object, **kwargs: object) -> bool:
        try:
            return original(*args, **kwargs)
        except Exception as exc:
            lookup = self._current(AOTLookup)
            if lookup is None or lookup.hit is None:
                raise
            lookup.reject(exc)
            return False

    def _wrap_post_compile(
        self, original: Function[object], entry: AOTResult, *args: object, **kwargs: object
    ) -> object:
        lookup = self._current(AOTLookup)
        if lookup is None:
            return original(entry, *args, **kwargs)
        hit = lookup.hit_of(entry)
        lookup.confirm_with_ranks()
        with _rolled_back_on_error():
            try:
                if hit is not None and internals.is_first_call_fake():
                    from s3cache.hooks._distributed import fake_first_call

                    fake_first_call(entry, Artifact.first_call_of(hit.entry))
                function = self._rebuilt(lookup, original, entry, *args, **kwargs)
            except Exception as exc:
                if hit is None:
                    raise
                lookup.reject(exc)
                # A miss to torch: it compiles, and what it saves replaces the entry.
                raise internals.miss_error.get()(f"s3cache: {exc}") from exc
            lookup.confirm_with_ranks()
        if hit is not None:
            self._accept(lookup, hit, entry)
        return function

    def _rebuilt(
        self,
        lookup: AOTLookup,
        original: Function[object],
        entry: AOTResult,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Return a callable that behaves on later calls as one does that is compiled here."""
        conditions = conditions_of(entry)
        if conditions is None:
            return original(entry, *args, **kwargs)
        self._backwards.attach(entry, conditions)
        function = original(entry, *args, **kwargs)
        add_guards(conditions, lookup.sources)
        return function

    # -- saves

    def _save(
        self, original: Function[None], key: str, entry: AOTResult, *args: object, **kwargs: object
    ) -> None:
        saving = Save(level="aot", key=key, result=entry, is_shared=self._keys.is_shared(key))
        save = partial(original, key, entry, *args, **kwargs)
        self._run(saving, save, entry, entry.runtime_metadata)

    def _prepare(self, saving: Save[AOTResult]) -> None:
        noted = note_conditions(saving.result, self._compiles.compile_of(saving.key))
        saving.relies_on = described(noted)

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

    def _artifact(self, saving: Save[AOTResult], content: bytes) -> Artifact:
        artifact = super()._artifact(saving, content)
        first_call = self._compiles.outputs(saving.key)
        if FIRST_CALL in artifact.components and first_call is None:
            raise NotSharableError(
                "fakify-first-call", "torch has not said what its first call returns"
            )
        return replace(artifact, runtime=packed(describe(saving.result)), first_call=first_call)

    def _saved(self, saving: Save[AOTResult], saved: Saved, size: int) -> None:
        compile_s = sum(self._compile_ns(saving.result)) / 1e9
        self._log.saved(saving.key, size, saved.elapsed_s, compile_s)
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
            self._log.bypassed("aot", reasons, None, key=current.key or "")
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
