"""The AOT level: whole graphs, forward and backward in one entry.

torch's own ``try_load`` and ``save`` run as they are, with their counters, trace artifacts and
time-out extensions. The first makes a key (``_keys``), goes through the entries under it, has each
one's guards evaluated, and makes a callable of the one that it takes. The second pickles the
entry, records it for ``save_cache_artifacts``, and writes it to torch's directory: that write comes
here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from s3cache.artifact import Artifact, describe, packed, variant_of
from s3cache.cache import Hit, Saved
from s3cache.errors import CorruptError
from s3cache.graph import FIRST_CALL, BypassReason, Code
from s3cache.hooks._backwards import Backwards
from s3cache.hooks._conditions import (
    UnrecordedError,
    add_guards,
    conditions_hold,
    conditions_of,
    described,
    failing_conditions,
    note_conditions,
)
from s3cache.hooks._first_calls import UndescribedError, fake_first_call
from s3cache.hooks._keys import is_made_for_threads
from s3cache.hooks._level import Level, Lookup, Save, Shared, saves
from s3cache.hooks._patching import Patches
from s3cache.hooks._portable import without_sources
from s3cache.stats import Reason
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.nn import Module

    from s3cache.hooks._rank_consensus import RankConsensus
    from s3cache.torch_api.protocols import AOTConfig, AOTResult, Function

__all__ = ["AOTGraphs"]


class AOTLookup(Lookup):
    """One call of ``try_load``.

    Args:
        config: how AOTAutograd is to go about the graph.
        consensus: what other ranks say, if all must hit.
    """

    def __init__(self, config: AOTConfig, consensus: RankConsensus | None) -> None:
        super().__init__("aot")
        self._consensus = consensus
        self.config = config

    @property
    def sources(self) -> Sequence[object]:
        """Where Dynamo takes each input from."""
        return self.config.aot_autograd_arg_pos_to_source or ()

    def confirm_with_ranks(self) -> None:
        """Go on if all other ranks hit too, so far.

        Raises:
            Exception: a miss to torch, as one of them does not.
        """
        if self._consensus is not None and not self._consensus.all_hit():
            if self.entries is not None:
                self.entries.overrule(Reason.RANKS)
            raise internals.miss_error.get()("s3cache: another rank has missed")

    def close(self) -> None:
        """Count the outcome, if torch got as far as to ask for entries, and tell other ranks."""
        if self._consensus is not None:
            self._consensus.close()
        if self.entries is not None:
            self.entries.close()


class AOTGraphs(Level["AOTResult"]):
    """Puts a cache before torch's own directory of whole graphs."""

    name = "aot"

    def __init__(self, shared: Shared, backwards: Backwards) -> None:
        super().__init__(shared)
        self._backwards = backwards

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
        patches.replace(internals.try_load, self._loader)
        patches.replace(internals.evaluate_guards, self._evaluator)
        patches.replace(internals.wrap_post_compile, self._rebuilder)
        patches.replace(internals.save, self._saver)
        patches.replace(internals.pickle_entry, self._pickler)

    # -- what the level says of itself

    def _type(self) -> type[AOTResult]:
        return internals.aot_result.get()

    def _graphs(self, result: AOTResult) -> list[object]:
        compiled = (result.compiled_fw, result.compiled_bw)
        return [each.result for each in compiled if each is not None]

    def _compile_ns(self, result: AOTResult) -> tuple[int, int]:
        return int(result.forward_time_taken_ns), int(result.backward_time_taken_ns)

    def _guards(self, result: AOTResult) -> str | None:
        return result.guards_expr

    def _misfit(self, result: AOTResult, lookup: Lookup) -> Callable[[], list[str]] | None:
        conditions = conditions_of(result)
        if conditions is None:
            if lookup.candidate is not None:  # an entry of ours
                raise CorruptError("entry", "does not say what its code relies on")
            return None
        if conditions_hold(conditions, lookup.inputs):
            return None
        sources = cast("AOTLookup", lookup).sources
        return partial(failing_conditions, conditions, lookup.inputs, sources)

    def _artifact(self, saving: Save[AOTResult], content: bytes) -> Artifact:
        artifact = super()._artifact(saving, content)
        first_call = self._compiles.outputs(str(saving.key))
        if FIRST_CALL in artifact.components and first_call is None:
            raise UndescribedError("torch has not said what its first call returns")
        with self._hidden_sources(saving.result):
            runtime = packed(describe(saving.result))
        return replace(artifact, runtime=runtime, first_call=first_call)

    # -- lookups

    def _loader(self, original: Function[object]) -> Function[object]:
        def try_load(*args: object, **kwargs: object) -> object:
            lookup = AOTLookup(cast("AOTConfig", args[2]), _consensus(args))
            with (
                self._state.entered(lookup),
                self._log.shown("s3cache.lookup") as event,
            ):
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

        return try_load

    def _bypassed(self, lookup: Lookup, mod: Module, event: dict[str, object]) -> None:
        codes = " ".join(dict.fromkeys(reason.code for reason in lookup.reasons))
        event.update(level="aot", outcome="bypass", reason=codes)
        self._log.bypassed("aot", lookup.reasons, internals.graph_module_of(mod))
        self._bypasses.met(lookup.reasons, lookup.error)

    def _begin(self, lookup: AOTLookup) -> None:
        """Have what is compiled after this miss end in an entry."""
        key = str(lookup.key)
        of_threads = is_made_for_threads(self._keys.components(key))
        try:
            self._compiles.begin(key, lookup.config, lookup.inputs, of_threads=of_threads)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            lookup.met(exc)
            self._warn(saves, "a graph will not be cached as a whole", exc)

    def _evaluator(self, original: Function[bool]) -> Function[bool]:
        def evaluate_guards(*args: object, **kwargs: object) -> bool:
            try:
                return original(*args, **kwargs)
            except Exception as exc:
                lookup = self._current(AOTLookup)
                if lookup is None or lookup.candidate is None:
                    raise
                lookup.reject(exc)
                return False

        return evaluate_guards

    def _rebuilder(self, original: Function[object]) -> Function[object]:
        def wrap_post_compile(entry: AOTResult, *args: object, **kwargs: object) -> object:
            lookup = self._current(AOTLookup)
            if lookup is None:
                return original(entry, *args, **kwargs)
            rebuild = partial(self._conditionally, lookup, original, entry, *args, **kwargs)
            hit = self._hit_of(entry, lookup)
            lookup.confirm_with_ranks()
            with _undone_if_it_fails():
                function = rebuild() if hit is None else self._rebuilt(hit, lookup, entry, rebuild)
                lookup.confirm_with_ranks()
            if hit is not None:
                self._accept(lookup, hit, entry)
            return function

        return wrap_post_compile

    def _rebuilt(
        self, hit: Hit, lookup: Lookup, entry: AOTResult, rebuild: Callable[[], object]
    ) -> object:
        try:
            with self._kernels.only(Artifact.kernels_of(hit.entry)):
                if internals.is_first_call_fake():
                    fake_first_call(entry, Artifact.first_call_of(hit.entry))
                return rebuild()
        except Exception as exc:
            lookup.reject(exc)
            # A miss to torch: it compiles, and what it saves replaces the entry.
            raise internals.miss_error.get()(f"s3cache: {exc}") from exc

    def _conditionally(
        self,
        lookup: AOTLookup,
        original: Function[object],
        entry: AOTResult,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Return a callable that does on later calls too what one does that is compiled here."""
        conditions = conditions_of(entry)
        if conditions is None:
            return original(entry, *args, **kwargs)
        self._backwards.attach(entry, conditions)
        function = original(entry, *args, **kwargs)
        add_guards(conditions, lookup.sources)
        return function

    # -- saves

    def _saver(self, original: Function[None]) -> Function[None]:
        def save(key: str, entry: AOTResult, *args: object, **kwargs: object) -> None:
            saving = Save("aot", key, entry, is_shared=self._keys.is_shared(key))
            with self._state.entered(saving):
                if not saving.is_shared or self._note_conditions(saving):
                    original(key, entry, *args, **kwargs)
                self._raise_if_strict(saving)

        return save

    def _note_conditions(self, saving: Save[AOTResult]) -> bool:
        """Put into an entry what its code relies on; return whether it may be saved."""
        try:
            noted = note_conditions(saving.result, self._compiles.compile_of(str(saving.key)))
        except UnrecordedError as exc:
            self._refused("unrecorded", exc)
            return False
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._failed(saving, exc)
            return False
        saving.relies_on = described(noted)
        return True

    def _pickler(self, original: Function[bytes | None]) -> Function[bytes | None]:
        def pickle_entry(entry: AOTResult, *args: object, **kwargs: object) -> bytes | None:
            saving: Save[AOTResult] | None = self._current(Save)
            if saving is None or not saving.is_shared:
                return original(entry, *args, **kwargs)
            context = self._made_portable(saving, entry, entry.runtime_metadata)
            if context is None:
                return None
            with context:
                content = original(entry, *args, **kwargs)
            if content is None:  # torch has logged what it met
                field = internals.find_unpicklable_field.get()(entry) or "as a whole"
                message = f"what it was compiled to cannot be pickled ({field})"
                self._refused("entry", internals.bypass_error.get()(message))
            return content

        return pickle_entry

    def _hidden_sources(self, entry: AOTResult) -> contextlib.AbstractContextManager[None]:
        if self._engine.settings.share_sources:
            return contextlib.nullcontext()
        return without_sources(entry, entry.runtime_metadata, *self._graphs(entry))

    def _saved(self, saving: Save[AOTResult], saved: Saved, size: int) -> None:
        compile_s = sum(self._compile_ns(saving.result)) / 1e9
        self._log.saved(str(saving.key), size, saved.elapsed_s, compile_s)
        if internals.tiers_asked("aot").remote or not internals.tiers_asked("fx").remote:
            self._supersede(saving.result)

    def _supersede(self, entry: AOTResult) -> None:
        """Take back the entries of its FX graphs, which nothing needs any more."""
        for graph in self._graphs(entry):
            if isinstance(graph, internals.compiled_graph.get()) and graph._fx_graph_cache_key:
                self._engine.supersede(graph._fx_graph_cache_key, variant_of(graph.guards_expr))

    def _refused(self, code: Code, error: Exception) -> None:
        reasons = [BypassReason(code, str(error))]
        self._bypasses.met(reasons, what="a compiled graph is not shared")
        current = self._state.current
        if current is not None:
            self._log.bypassed("aot", reasons, None, key=current.key or "")
            current.met(error)


def _consensus(args: Sequence[object]) -> RankConsensus | None:
    """Return the consensus on what ``try_load`` looks up, where ranks have to agree."""
    if not internals.ranks_must_agree():
        return None
    from s3cache.hooks._rank_consensus import consensus_for

    mod, inputs, *_ = args
    gm = internals.graph_module_of(cast("Module", mod))
    return consensus_for(gm, cast("Sequence[object]", inputs))


@contextlib.contextmanager
def _undone_if_it_fails() -> Iterator[None]:
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
