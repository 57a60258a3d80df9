"""The seam at AOTAutograd's lookups: entries come from the cache, and bad ones are set aside.

torch's own ``try_load`` runs as it is, with its counters, trace artifacts and time-out extensions.
It makes a key (``_keys``), goes through the entries under it, has each one's guards evaluated, and
makes a callable of the one that it takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from s3cache._logs import logger_of
from s3cache._pages import pointer
from s3cache._problems import code_of
from s3cache.artifact import Artifact, unpickled
from s3cache.cache import Engine, Hit, JudgedLookup
from s3cache.errors import CorruptError
from s3cache.hooks._backwards import Backwards
from s3cache.hooks._bundling import Bundling
from s3cache.hooks._bypasses import Bypasses
from s3cache.hooks._conditions import Conditions, add_guards, conditions_of, hold
from s3cache.hooks._first_calls import fake_first_call
from s3cache.hooks._kernels import Kernels
from s3cache.hooks._keys import CacheCall, CacheCalls, KeySeam, is_made_for_threads
from s3cache.hooks._patching import Patches
from s3cache.hooks._records import Recording, in_words
from s3cache.hooks._rejected import failing_conditions, failing_guards
from s3cache.hooks._votes import Ballot, ballot_on
from s3cache.stats import Level, Reason
from s3cache.torch_api import Internal, internals

if TYPE_CHECKING:
    from torch.nn import Module

    from s3cache.torch_api.protocols import AOTConfig, AOTResult, Function

__all__ = ["LookupSeam", "asks_remote", "of_torch_if_asked"]

logger = logger_of("lookups")

Candidate: TypeAlias = tuple[object, bytes, bool]


class Lookup(CacheCall):
    """One call of ``try_load``.

    Attributes:
        judged: the entries under its key, once torch asks for them.
        candidate: the one that torch judges or rebuilds now, and where it came from.
        saved_s: of a hit, what making it took where it was made.
        rejected: of entries under its key, what says why they do not fit.

    Args:
        config: how AOTAutograd is to go about the graph.
        ballot: what other ranks say, if all must.
    """

    def __init__(self, config: AOTConfig, ballot: Ballot | None) -> None:
        super().__init__()
        self._ballot = ballot
        self.config = config
        self.judged: JudgedLookup | None = None
        self.candidate: tuple[AOTResult, Hit] | None = None
        self.saved_s = 0.0
        self.rejected: list[Callable[[], list[str]]] = []

    def accept(self, hit: Hit) -> None:
        """``hit`` was made into a callable."""
        assert self.judged is not None
        self.judged.accept(hit)

    def reject(self, hit: Hit, error: Exception) -> None:
        """``hit`` cannot be used: have it set aside, and the lookup go on."""
        assert self.judged is not None
        self.met(error)
        self.candidate = None
        self.rejected.append(lambda: [f"cannot be used: {error}"])
        self.judged.reject(hit, error)

    def agree(self) -> None:
        """This rank hits, so far; go on if all others do.

        Raises:
            Exception: a miss to torch, for one of them does not.
        """
        if self._ballot is not None and not self._ballot.all_hit():
            if self.judged is not None:
                self.judged.overrule(Reason.RANKS)
            raise internals.miss_error.get()("s3cache: another rank has missed")

    def close(self) -> None:
        """Count the outcome, if torch got as far as to ask for entries, and tell other ranks."""
        if self._ballot is not None:
            self._ballot.close()
        if self.judged is not None:
            self.judged.close()


class LookupSeam:
    """Puts a cache before torch's own directory of entries."""

    def __init__(
        self,
        engine: Engine,
        calls: CacheCalls,
        keys: KeySeam,
        kernels: Kernels,
        bundling: Bundling,
        backwards: Backwards,
        bypasses: Bypasses,
        recording: Recording,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._keys = keys
        self._kernels = kernels
        self._bundling = bundling
        self._backwards = backwards
        self._bypasses = bypasses
        self._recording = recording

    def install(self, patches: Patches) -> None:
        """Replace what looks an entry up, judges it and makes a callable of it."""
        patches.replace(internals.try_load, self._loader)
        patches.replace(
            internals.should_use_remote_cache, partial(asks_remote, self._engine, "aot")
        )
        patches.replace(
            internals.remote_cache, partial(of_torch_if_asked, internals.uses_remote_cache)
        )
        patches.replace(internals.iterate_over_candidates, self._candidates)
        patches.replace(internals.evaluate_guards, self._judge)
        patches.replace(internals.wrap_post_compile, self._rebuilder)

    def _loader(self, original: Function[object]) -> Function[object]:
        def try_load(*args: object, **kwargs: object) -> object:
            with (
                self._calls.entered(Lookup(_config(args), _ballot(args))) as lookup,
                self._recording.events.shown("s3cache.lookup") as event,
            ):
                self._bundling.end()
                try:
                    result = original(*args, **kwargs)
                finally:
                    lookup.close()
                    self._record(lookup, args, event)
                    if lookup.reasons:
                        self._bypasses.met(lookup.reasons, lookup.error)
                if lookup.key and not internals.is_hit(result) and self._keys.is_shared(lookup.key):
                    self._begin(lookup)
                if lookup.error is not None and self._engine.settings.strict:
                    raise lookup.error
                return result

        return try_load

    def _record(self, lookup: Lookup, args: Sequence[object], event: dict[str, object]) -> None:
        if lookup.reasons:
            codes = " ".join(dict.fromkeys(reason.code for reason in lookup.reasons))
            event.update(level="aot", outcome="bypass", reason=codes)
            gm = internals.graph_module_of(cast("Module", args[0]))
            self._recording.bypassed("aot", lookup.reasons, gm)
        elif lookup.judged is not None:
            outcome = lookup.judged.close()
            event.update(in_words(outcome), key=str(lookup.key), level="aot")
            self._recording.ended(
                "aot",
                str(lookup.key),
                outcome,
                saved_s=lookup.saved_s,
                rejected=lookup.rejected,
            )

    def _begin(self, lookup: Lookup) -> None:
        key = str(lookup.key)
        of_threads = is_made_for_threads(self._keys.components(key))
        try:
            self._bundling.begin(key, lookup.config, lookup.inputs, of_threads=of_threads)
        except Exception as exc:
            lookup.met(exc)
            if not self._engine.settings.strict:
                logger.warning(
                    "a graph will not be cached as a whole %s", pointer(code_of(exc)), exc_info=True
                )

    def _current(self) -> Lookup | None:
        current = self._calls.current
        return current if isinstance(current, Lookup) else None

    # -- candidates

    def _candidates(self, original: Function[Iterator[Candidate]]) -> Function[Iterator[Candidate]]:
        def iterate_over_candidates(
            cls: type, *args: object, **kwargs: object
        ) -> Iterator[Candidate]:
            lookup = self._current()
            if lookup is not None:
                if self._keys.is_shared(lookup.key):
                    yield from self._entries(lookup)
                lookup.candidate = None
            if self._engine.uses_trusted_only:
                return  # torch's own are signed by nobody
            for candidate in original(cls, *args, **kwargs):
                if lookup is None or _fits(cast("AOTResult", candidate[0]), lookup):
                    yield candidate

        return iterate_over_candidates

    def _entries(self, lookup: Lookup) -> Iterator[Candidate]:
        try:
            asked = internals.tiers_asked("aot")
            lookup.judged = self._engine.judged(str(lookup.key), **asked._asdict())
            for hit in lookup.judged:
                try:
                    content = bytes(Artifact.entry_of(hit.entry, "aot"))
                    entry = unpickled(content)
                    if not isinstance(entry, internals.aot_result.get()):
                        raise CorruptError("entry", f"holds a {type(entry).__name__}")
                    if conditions_of(entry) is None:
                        raise CorruptError("entry", "does not say what its code relies on")
                    if not _fits(entry, lookup):
                        self._reject(lookup, entry, in_guards=False)
                        continue
                except Exception as exc:  # noqa: BLE001 - whatever unpickling meets
                    lookup.reject(hit, exc)
                    continue
                lookup.candidate = entry, hit
                yield entry, content, hit.tier == "local"
                if lookup.candidate is not None:  # torch asks for another one
                    self._reject(lookup, entry, in_guards=True)
        except Exception as exc:
            lookup.met(exc)
            if not self._engine.settings.strict:
                logger.warning(
                    "a lookup failed, which is a miss %s", pointer(code_of(exc)), exc_info=True
                )

    @staticmethod
    def _reject(lookup: Lookup, entry: AOTResult, *, in_guards: bool) -> None:
        """Note why ``entry`` does not fit; it is asked for where the lookup ends as a miss."""
        if in_guards:
            why = partial(failing_guards, entry.guards_expr or "", lookup.inputs)
        else:
            sources = lookup.config.aot_autograd_arg_pos_to_source or ()
            conditions = cast("Conditions", conditions_of(entry))
            why = partial(failing_conditions, conditions, lookup.inputs, sources)
        lookup.rejected.append(why)

    def _judge(self, original: Function[bool]) -> Function[bool]:
        def evaluate_guards(*args: object, **kwargs: object) -> bool:
            try:
                return original(*args, **kwargs)
            except Exception as exc:
                lookup = self._current()
                if lookup is None or lookup.candidate is None:
                    raise
                lookup.reject(lookup.candidate[1], exc)
                return False

        return evaluate_guards

    # -- the callable

    def _rebuilder(self, original: Function[object]) -> Function[object]:
        def wrap_post_compile(entry: AOTResult, *args: object, **kwargs: object) -> object:
            lookup = self._current()
            if lookup is None:
                return original(entry, *args, **kwargs)
            candidate = lookup.candidate
            hit = None if candidate is None or candidate[0] is not entry else candidate[1]
            lookup.agree()
            with _undone_if_it_fails():
                if hit is None:
                    function = self._conditionally(lookup, original, entry, *args, **kwargs)
                else:
                    function = self._rebuilt(hit, lookup, original, entry, *args, **kwargs)
                lookup.agree()
            if hit is not None:
                self._accept(hit, lookup, entry)
            return function

        return wrap_post_compile

    def _rebuilt(
        self,
        hit: Hit,
        lookup: Lookup,
        original: Function[object],
        entry: AOTResult,
        *args: object,
        **kwargs: object,
    ) -> object:
        try:
            with self._kernels.only(Artifact.kernels_of(hit.entry)):
                if internals.is_first_call_fake():
                    fake_first_call(entry, Artifact.first_call_of(hit.entry))
                return self._conditionally(lookup, original, entry, *args, **kwargs)
        except Exception as exc:
            lookup.reject(hit, exc)
            # A miss to torch: it compiles, and what it saves replaces the entry.
            raise internals.miss_error.get()(f"s3cache: {exc}") from exc

    def _conditionally(
        self,
        lookup: Lookup,
        original: Function[object],
        entry: AOTResult,
        *args: object,
        **kwargs: object,
    ) -> object:
        """The callable, which does on later calls too what one does that is compiled here."""
        conditions = conditions_of(entry)
        if conditions is None:
            return original(entry, *args, **kwargs)
        self._backwards.attach(entry, conditions)
        function = original(entry, *args, **kwargs)
        add_guards(conditions, lookup.config.aot_autograd_arg_pos_to_source or ())
        return function

    def _accept(self, hit: Hit, lookup: Lookup, entry: AOTResult) -> None:
        lookup.accept(hit)
        saved_s = (entry.forward_time_taken_ns + entry.backward_time_taken_ns) / 1e9
        lookup.saved_s = saved_s
        self._engine.count_time_saved(saved_s)
        logger.info("hit %s (%s), %.1f s of compiling saved", lookup.key, hit.tier, saved_s)


def _ballot(args: Sequence[object]) -> Ballot | None:
    """On what ``try_load`` with these arguments looks up, where ranks have to agree."""
    if not internals.ranks_must_agree():
        return None
    mod, inputs, *_ = args
    return ballot_on(
        internals.graph_module_of(cast("Module", mod)), cast("Sequence[object]", inputs)
    )


def _config(args: Sequence[object]) -> AOTConfig:
    """What ``try_load`` with these arguments is told of the graph."""
    return cast("AOTConfig", args[2])


def _fits(entry: AOTResult, lookup: Lookup) -> bool:
    """Whether what the code relies on holds here; torch asks for guards on sizes of inputs."""
    conditions = conditions_of(entry)
    return conditions is None or hold(conditions, lookup.inputs)


# -- torch's options for remote caches, at both levels


def asks_remote(engine: Engine, level: Level, original: Callable[[], bool]) -> Callable[[], bool]:
    """Have torch know, and log, that a remote cache is asked where that is ours."""

    def should_use_remote_cache() -> bool:
        return original() or (engine.has_remote and internals.tiers_asked(level).remote)

    return should_use_remote_cache


def of_torch_if_asked(
    asked: Internal[Callable[[], bool]], original: Callable[[], object]
) -> Callable[[], object]:
    """Have torch's own remote cache asked only where its option is set, as without s3cache."""

    def get_remote_cache() -> object:
        return original() if asked.get()() else None

    return get_remote_cache


@contextlib.contextmanager
def _undone_if_it_fails() -> Iterator[None]:
    """Take back what a half rebuilt callable has told the rest of the compile."""
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
