"""The engine: the local tier before the remote tier, and the end of their errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from s3cache import entries, frame
from s3cache.cache._results import CacheEvents, Hit, Miss, NotSaved, Retry, Saved
from s3cache.errors import (
    ClosedError,
    ConfigError,
    CorruptError,
    ReadOnlyError,
    Reason,
    StoreError,
    TooLargeError,
    UntrustedError,
    is_device_trouble,
    is_machine_trouble,
    reason_for,
)
from s3cache.frame import Frame
from s3cache.records import Event, Record, Recorder, Run
from s3cache.seam import Feature, features, hints, kinds
from s3cache.settings import Settings
from s3cache.stats import (
    CacheStats,
    Counters,
    EntryKind,
    FeatureCounters,
    LevelStats,
    Listener,
    Listeners,
    TierName,
    TransferEvent,
)
from s3cache.store import Buffer, Store
from s3cache.tier import (
    DiskTier,
    FlushReport,
    LocalTier,
    Prefetch,
    RemoteTier,
    Uploads,
    before_exit,
    open_disk,
)
from s3cache.trust import pack, sign
from s3cache.util.logs import Problems, logger_of
from s3cache.util.threads import call_in_child

_T = TypeVar("_T")

logger = logger_of("storage")

# How long the upload of an entry waits that another may replace: a training step that compiles a
# forward usually reaches its backward within this time, if at all.
_DELAY_S = 60.0
# How long deleting an entry from the remote may take.
_DISCARD_S = 10.0
# Limits on closing, besides the wait for uploads: in all, and for writing the last records.
_RELEASE_S, _RECORDS_S, _MOMENT_S = 3.0, 0.5, 0.1
# A forked child keeps inherited tiers unused: collecting them would close the parent's connections.
_inherited: list[tuple[object, ...]] = []
# A writer can put any number of entries under a key. These bound how many useless entries are
# fetched, and how many in all. Most keys have one entry, those with dynamic shapes a few.
_MAX_REJECTED, _MAX_FETCHED = 32, 256


# -- one lookup: the places it searches, their order, and its outcome


@dataclass(eq=False)
class CandidateLookup(AbstractContextManager["CandidateLookup"]):
    """The entries under one key; the caller accepts at most one.

    ::

        with engine.candidates(key) as lookup:
            for hit in lookup:
                if fits(hit.entry):
                    lookup.accept(hit)
                    break

    It counts as one lookup when it is closed: as a hit if an entry was accepted, else as a miss.
    The caller's own time is not counted. Failures are skipped, unless the cache is strict.
    """

    _engine: Engine
    _key: str
    _skip: Reason | None  # the reason not to search at all, if any
    _asks_local: bool
    _asks_remote: bool
    _counters: Counters
    # Called if no entry is chosen: may wait for one, and says where to search again.
    _retry: Callable[[], Retry | None] | None
    _all: bool  # whether to go through the entries even if none may be accepted

    def __post_init__(self) -> None:
        self._local, self._problems = self._engine.local, self._engine.problems
        self._restart()
        self._first = entries.first_name(self._key)
        self._has_first = False  # whether the first name is on this machine
        self._offered: set[str] = set()  # names of the entries that were yielded
        self._reason = self._skip or Reason.ABSENT
        self._error: Exception | None = None  # the first error
        self._last_error: Exception | None = None
        self._rejected = 0  # refused, or damaged
        self._accepted: Hit | None = None
        self._retried: Retry | None = None
        self._elapsed_s = 0.0
        self._closed = False

    def __iter__(self) -> Iterator[Hit]:
        """Yield verified entries, each variant once, cheapest first.

        With ``strict``, raise S3CacheError if it misses for a reason other than absence.
        """
        candidates = iter(()) if self._skip and not self._all else self._candidates()
        while True:
            started = time.perf_counter()
            try:
                candidate = next(candidates, None)
            finally:
                self._elapsed_s += time.perf_counter() - started
            if candidate is None:
                return
            yield Hit(*candidate, self._elapsed_s)

    def accept(self, hit: Hit) -> None:
        """Choose ``hit``: the lookup ends as a hit. The next process of the program fetches it."""
        self._accepted = hit
        self._engine.events.used.tell(self._key, hit.entry.header.variant)

    def force_miss(self, reason: Reason) -> None:
        """End as a miss with ``reason``, though an entry might fit."""
        self._accepted, self._reason = None, reason

    @property
    def is_absent(self) -> bool:
        """Whether no tier had an entry under the key."""
        return self._reason is Reason.ABSENT and not self._offered and not self._rejected

    def reject(self, hit: Hit, error: Exception) -> None:
        """Set an unusable ``hit`` aside, unless this machine or its device is at fault."""
        if is_machine_trouble(error):
            self._reason, problem = Reason.MACHINE, "an entry cannot be used on this machine now"
        elif is_device_trouble(error):
            self._reason, problem = Reason.DEVICE, "an entry's kernels cannot be loaded here now"
        else:
            self._reason, problem = Reason.CORRUPT, "an entry cannot be used and is set aside"
            self._local.set_aside(hit.entry)
        self._problems.warn("entry", problem, error)

    def take_back(self) -> bool:
        """Count a lookup that ended with a hit as a miss; return False if it was none."""
        hit, self._accepted, self._reason = self._accepted, None, Reason.CORRUPT
        if hit is not None:
            self._counters.add(hit.tier, hits=-1, hit_bytes=-hit.entry.size)
            self._counters.add(Reason.CORRUPT, misses=1)
        return hit is not None

    def close(self) -> Hit | Miss:
        """Return the outcome; the first call counts it."""
        hit, reason = self._accepted, self._skip or self._reason
        if not self._closed:
            self._closed = True
            if hit is None:
                self._counters.add(reason, misses=1, miss_latency=self._elapsed_s)
                if self._retried is not None and self._retried.in_vain is not None:
                    self.attempt(self._retried.in_vain)
            else:
                counts = {"hits": 1, "hit_bytes": hit.entry.size, "hit_latency": self._elapsed_s}
                self._counters.add(hit.tier, **counts)
        return hit or Miss(reason, self._elapsed_s, self._error)

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the search

    def _candidates(self) -> Iterator[tuple[Frame, TierName]]:
        if self._asks_local:
            yield from self._in_local()
        remote = self.attempt(self._engine.remote_now) if self._asks_remote else None
        if remote is not None:
            yield from self._in_remote(remote)
        elif self.is_absent and self._asks_local and (error := self._local.read_error):
            self._error, self._reason = error, reason_for(error)  # the entry may exist
        if self._retry is not None and self._asks_local:
            self._retried = retry = self.attempt(self._retry)
            if retry is None:
                return
            self._restart()
            yield from self._in_local()  # another process may have saved it
            if retry.in_remote and remote is not None:
                yield from self._in_remote(remote)
            self._reason = retry.reason or self._reason

    def _in_local(self) -> Iterator[tuple[Frame, TierName]]:
        # Most entries have one of these two names; only others need a listing.
        usual = (self._first, entries.variant_name(self._key, ""))
        present, offered = self.attempt(lambda: self._local.search(self._key, usual)), ""
        if isinstance(present, tuple):
            offered, data, entry = present
            entry = entry or self.attempt(lambda: self._local.verify(offered, data))
            yield from self._offer("local", offered, entry)
            present = self.attempt(lambda: self._local.search(self._key, ()))
        for info in present if isinstance(present, list) else ():
            if info.key != offered:
                yield from self._load(info.key)

    def _load(self, name: str) -> Iterator[tuple[Frame, TierName]]:
        yield from self._offer("local", name, self.attempt(lambda: self._local.load(name)))

    def _in_remote(self, remote: RemoteTier) -> Iterator[tuple[Frame, TierName]]:
        list_names = remote.names
        may_have_landed = self._asks_local and not self._has_first
        if may_have_landed and self.attempt(lambda: bool(self._local.present([self._first]))):
            yield from self._load(self._first)
        if not self._has_first:
            before = self._last_error
            first = self._fetch(remote, self._first)
            yield from self._offer("remote", self._first, first)
            if first is None and self._last_error is before:  # it is absent
                list_names = remote.names_without_first
            elif first is None and not isinstance(self._last_error, (CorruptError, UntrustedError)):
                return  # the remote does not answer
        fetched = 0
        for name in self.attempt(lambda: list_names(self._key, self._left_s())) or ():
            if self._rejected >= _MAX_REJECTED or fetched >= _MAX_FETCHED:
                return
            # The copy of this machine has been offered already.
            if name not in self._offered:
                fetched += 1
                yield from self._offer("remote", name, self._fetch(remote, name))

    def _fetch(self, remote: RemoteTier, name: str) -> Frame | None:
        # After a rejected entry, check signatures before downloading others.
        suspect = self._rejected > 0
        return self.attempt(lambda: remote.load(name, self._left_s(), suspect=suspect))

    def _restart(self) -> None:
        """Give the remote its full time from now on."""
        self._deadline = time.monotonic() + self._engine.settings.lookup_timeout_s

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _offer(
        self, tier: TierName, name: str, entry: Frame | None
    ) -> Iterator[tuple[Frame, TierName]]:
        if entry is None:
            return
        self._has_first |= name == self._first
        own = entries.variant_name(self._key, entry.header.variant)
        if self._local.is_marked(entry):
            self._rejected += 1
            if self._error is None:
                self._reason = Reason.CORRUPT
        elif own not in self._offered:
            self._offered.add(own)
            if self._error is None:
                self._reason = Reason.GUARD  # unless the caller accepts it
            yield entry, tier

    def attempt(self, call: Callable[[], _T]) -> _T | None:
        """Return the result of ``call``; raise if it fails and the cache is strict, else go on."""
        try:
            return call()
        except UntrustedError as exc:
            # Not a failure: other writers may put such entries into a bucket.
            self._last_error = exc
            self._rejected += 1
            self._counters.add(exc.cause, refused=1)
            if self._error is None:
                self._reason = Reason.UNTRUSTED
            self._problems.warn("trust", "an entry is not used", exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._last_error = exc
            self._rejected += isinstance(exc, CorruptError)
            if self._error is None:
                self._error, self._reason = exc, reason_for(exc)
            self._problems.raise_or_warn("lookup", "a lookup failed and counts as a miss", exc)
        return None


# -- the engine


class Engine(AbstractContextManager["Engine"]):
    """The tiers of a :class:`Cache`, with what torch's hooks and features need beyond it.

    These are kinds of entries, candidates of a lookup, events, and records.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        open_remote: Callable[[], Store] | None = None,
        identity: str = "",
        used: Sequence[Feature] = (),
    ) -> None:
        self.settings, self._used = settings, used
        self.policy, self._signer = settings.trust_policy(), settings.signer()
        self._open_remote = None if settings.mode == "off" else open_remote
        self._closed = False
        self._begin(open_disk(settings, identity))
        call_in_child(self._begin_in_child)

    def _begin(self, disk: DiskTier | None) -> None:
        """Create the state that belongs to one process."""
        self._mutex = threading.Lock()
        self.events = CacheEvents(strict=self.settings.strict)
        self.counts = {each.name: FeatureCounters(each) for each in features()}
        self._counters_of = {kind: Counters() for kind in ("aot", "fx", *kinds())}
        self._counters = self._counters_of["aot"]
        self._unsent: set[str] = set()  # names that are pending because no remote could be opened
        self._last_report = FlushReport(0, 0, None)
        self._listeners = Listeners()
        self._listeners.subscribe(self._count_transfer)
        self.problems = Problems(strict=self.settings.strict)
        self._replaceable = entries.Replaceable(everything=self.settings.recache)
        trust = None if self.policy.level == "off" else self.policy.check
        #: The local tier; its disk may be missing.
        self.local = LocalTier(disk, self._counters, self.problems, self._replaceable, trust)
        self._records = Recorder(None if disk is None or not self.settings.record else disk.root)
        if self.settings.record:
            self._listeners.subscribe(self._records.record_transfer)
        self._remote: RemoteTier | None = None
        self._uploads: Uploads | None = None
        self._forget_exit = before_exit(self._at_exit)
        #: What features keep for this process, by their names.
        self.parts: dict[str, Any] = {}
        for feature in self._used:
            if feature.is_used(self.settings):
                strict = self.settings.strict
                self.parts[feature.name] = feature.call(feature.begins, self, strict=strict)

    def _begin_in_child(self) -> None:
        _inherited.append((self._remote, self._uploads))
        self._begin(self.local.disk)
        if self._closed:
            self._forget_exit()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking up

    def lookup(self, key: str, accept: Callable[[Frame], bool] | None = None) -> Hit | Miss:
        with self.candidates(key) as lookup:
            for hit in lookup:
                if accept is None or lookup.attempt(partial(accept, hit.entry)):
                    lookup.accept(hit)
                    break
        return lookup.close()

    def candidates(
        self,
        key: str,
        kind: EntryKind = "aot",
        *,
        local: bool = True,
        remote: bool = True,
        counters: Counters | None = None,
        retry: Callable[[], Retry | None] | None = None,
        replaced: bool = False,
    ) -> CandidateLookup:
        """Look up the entries under ``key``, so that the caller can choose one; count by ``kind``.

        If the caller chooses none, ``retry`` is called, which may wait for another process. With
        ``recache``, none may be accepted, and only with ``replaced`` the lookup goes through them.
        """
        skip = Reason.FORCED if self.settings.recache else None
        if self._closed or self.settings.mode in ("off", "write-only"):
            skip = Reason.DISABLED
        return CandidateLookup(
            self,
            entries.check_key(key),
            skip,
            local,
            remote,
            counters or self._counters_of[kind],
            None if skip else retry,
            replaced and skip is Reason.FORCED,
        )

    def prefetch(self, keys: Iterable[str]) -> Prefetch:
        names = [entries.first_name(entries.check_key(key)) for key in keys]
        if self.settings.mode == "write-only" or not self.local.is_writable:
            return Prefetch([])
        try:
            remote = self.remote_now()
            return Prefetch([]) if remote is None else remote.prefetch(names)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self.problems.raise_or_warn("prefetch", "nothing can be prefetched", exc)
            failed = Prefetch(names)
            failed.count(failed=len(failed.names), error=exc)
            return failed

    # -- saving

    def save(
        self,
        key: str,
        entry: Frame | Buffer,
        *,
        kind: EntryKind = "aot",
        delayed: bool = False,
        remote: bool = True,
        once: bool = False,
        replaces: Sequence[Frame] = (),
    ) -> Saved | NotSaved:
        """Save like :meth:`Cache.save`; without ``remote``, on this machine only.

        The entry also takes the place of those in ``replaces``, under their variants. (Most writers
        may not delete from a bucket.) With ``once``, keep an entry that another process has saved
        since the lookup. With ``delayed``, upload after a minute, at the next flush or at the exit:
        another entry may replace it before.
        """
        started, counters = time.perf_counter(), self._counters_of[kind]
        size, durable, reason, error = 0, None, Reason.DISABLED, None
        try:
            new = entry if isinstance(entry, Frame) else frame.decode(entry)
            entries.check_entry(key, new)
            size = new.size
            if not (self._closed or self.settings.mode in ("off", "read-only")):
                durable = self._write(new, delayed=delayed, share=remote, once=once)
                for former in replaces:
                    self.local.discard(former)
                    if (variant := former.header.variant) != new.header.variant:
                        copy = frame.with_variant(new, variant)
                        self._write(copy, delayed=delayed, share=remote)
        except Exception as exc:
            if not size and not isinstance(exc, MemoryError):
                raise  # the caller's mistake: a bad entry, or another key
            if not self.settings.strict:
                self.problems.warn("save", "an entry could not be saved", exc)
            reason, error = reason_for(exc), exc
        elapsed_s = time.perf_counter() - started
        if durable is not None:
            counters.add(saved=1, saved_bytes=size, save_latency=elapsed_s)
            if remote:
                self.events.used.tell(key, new.header.variant)
            return Saved(durable, elapsed_s)
        counters.add(reason, not_saved=1, save_latency=elapsed_s)
        if self.settings.strict and error is not None:
            raise error
        return NotSaved(reason, elapsed_s, error)

    def _write(
        self, entry: Frame, *, delayed: bool, share: bool, once: bool = False
    ) -> bool | None:
        """Store the entry; return whether it survives this process, or None without a tier."""
        # Sign here and never at the upload: pending entries of other processes are not ours to
        # sign.
        data = self._signed(entry).data
        name = entries.variant_name(entry.header.key, entry.header.variant)
        share = share and self._open_remote is not None
        # If the remote cannot be opened now, it may be later, or by a later process.
        remote, error = self._try_remote() if share else (None, None)
        is_new = True

        def put(disk: DiskTier) -> None:
            nonlocal is_new
            if share:
                is_new = disk.put_pending(name, data, once=once)
            else:
                disk.put(name, data)

        uploads = self._uploads if remote is not None else None
        with nullcontext() if uploads is None else uploads.saving(name):
            durable = self.local.write(put)
            if uploads is not None and is_new:
                delay_s = _DELAY_S if delayed else 0.0
                uploads.add(name, None if durable else data, delay_s=delay_s)
        if uploads is None and not durable:
            if error := error or self.local.error:
                raise error
            return None
        if uploads is None and share and is_new:
            self._unsent.add(name)
        return durable

    def _signed(self, entry: Frame) -> Frame:
        """Return ``entry`` with our signature, if we have a key; unsigned if that fails."""
        if self._signer is None:
            return entry
        times = {"issued_s": int(time.time()), "ttl_s": int(self.settings.signature_ttl_s)}
        try:
            signature = sign(entry.digest, self._signer, audience=self.settings.audience, **times)
        except UntrustedError as exc:
            if self.policy.level == "require":  # an unsigned entry would be useless
                raise
            self.problems.warn("signing", "an entry is saved unsigned", exc)
            return entry
        return frame.decode(frame.signed(entry, lambda _: pack([signature])))

    # -- removing

    def remove_all(self, prefix: str) -> int:
        """Remove all entries with names that begin with ``prefix``; return their number."""
        if self._closed:
            raise ClosedError("the cache was closed")
        if self.settings.mode in ("off", "read-only"):
            raise ReadOnlyError(f"the mode is {self.settings.mode}", op="remove")
        self.flush(self.settings.exit_timeout_s)
        remote, disk = self.remote_now(), self.local.disk
        names = set() if remote is None else {*remote.remove(prefix)}
        if disk is not None:
            for info in disk.objects(prefix):
                disk.delete(info.key)
                names.add(info.key)
        return len(names)

    # -- counting

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self._listeners.subscribe(listener)

    def stats(self) -> CacheStats:
        usage = self.local.read(DiskTier.usage, None)
        more: dict[str, object] = {"local": usage, "fx": self._counters_of["fx"].read(LevelStats)}
        more["features"] = {name: counts.snapshot() for name, counts in self.counts.items()}
        levels = {kind: self._counters_of[kind].read(LevelStats) for kind in kinds()}
        more["kinds"] = {kind: of for kind, of in levels.items() if of.lookups or of.saved}
        if self._uploads is not None:
            more["pending"] = self._uploads.pending
        if (remote := self._remote) is not None:
            more |= {"breaker": remote.breaker.state, "remote": remote.metered.snapshot()}
        return self._counters.read(CacheStats, **more)

    # -- the life of a cache

    def start(self) -> None:
        remote, error = self._try_remote()
        if isinstance(error, ConfigError):
            raise error
        if remote is not None:
            remote.begin(remote.store.connect)  # the first real call reports an error

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        self.events.finishing.tell()
        if self.settings.mode in ("off", "read-only"):
            return FlushReport(0, 0, None)
        if self._closed:
            return self._last_report
        error = None
        if self._uploads is None and self._unsent:
            _, error = self._try_remote()
        if self._uploads is None:
            return FlushReport(len(self._unsent), 0, error)
        return self._uploads.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> FlushReport:
        if not self._closed:
            limit_s = self.settings.exit_timeout_s if timeout_s is None else timeout_s
            end = time.monotonic() + limit_s + _RELEASE_S
            try:
                self._last_report = self.flush(limit_s)
            finally:
                self._release(end)
        return self._last_report

    def _at_exit(self) -> None:
        self.events.finishing.tell()
        limit_s = self.settings.exit_timeout_s
        end = time.monotonic() + limit_s + _RELEASE_S
        if self._remote is not None and self._uploads is not None:
            report = self._last_report = self._uploads.flush(limit_s, until_a_pause=True)
            if report.remaining:
                left, lost = report.remaining, report.in_memory
                logger.warning(
                    "unfinished uploads to %s: %d; recorded for the next process on this machine: "
                    "%d; lost: %d", self._remote.url, left, left - lost, lost,
                )  # fmt: skip
        self._release(end)

    def _release(self, end: float) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
        self._forget_exit()
        self._records.close(_RECORDS_S)
        for tier in (self._uploads, self._remote, self.local.disk):
            if tier is not None:
                tier.close(max(end - time.monotonic(), _MOMENT_S))

    def remote_now(self) -> RemoteTier | None:
        """Return the remote tier; the first call in this process opens it."""
        if self._open_remote is None:
            return None
        with self._mutex:
            if self._remote is None and not self._closed:
                store, more = self._open_remote(), (self.settings, self._listeners)
                remote = self._remote = RemoteTier(store, *more, self.local, self._replaceable)
                self._uploads = Uploads(
                    remote.loop,
                    *more,
                    self.local.disk,
                    verify=remote.verify,
                    publish=remote.publish,
                    on_problem=self._upload_failed,
                    before_flush=store.forget_failures,
                )
                if self.settings.mode != "read-only":
                    self._uploads.start(self._unsent)
                self.events.remote_opened.tell(remote)
            return None if self._closed else self._remote

    def _count_transfer(self, event: TransferEvent) -> None:
        if event.step == "done" and not entries.key_of(event.name).startswith(hints()):
            name = f"{event.direction}ed"
            self._counters.add(**{name: 1, f"{name}_bytes": event.size})

    def _upload_failed(self, error: Exception) -> None:
        self._counters.add(upload_failures=1)
        if isinstance(error, TooLargeError):
            problem = "an entry stays on this machine only, and is not sent again"
            self.problems.warn("too large", problem, error)
        else:
            self.problems.warn("upload", "an upload failed", error)

    def _try_remote(self) -> tuple[RemoteTier | None, Exception | None]:
        """Return the remote tier, or the error that keeps it from opening."""
        try:
            return self.remote_now(), None
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self.problems.raise_or_warn("remote", "the remote cannot be opened", exc)
            return None, exc

    # -- for torch's hooks and features

    def remote(self) -> RemoteTier | None:
        """Return the remote tier, or None if there is none or it cannot be opened."""
        return self._try_remote()[0]

    @property
    def may_resign(self) -> bool:
        """Whether an entry of another machine stays equally trusted if we save it again."""
        return self._signer is not None or self.policy.level == "off"

    @property
    def has_remote(self) -> bool:
        """Whether a remote is configured; it may not answer."""
        return self._open_remote is not None

    def probe(self, key: str) -> str:
        """Return where an entry under ``key`` is, or why none is used; count nothing."""
        counters = Counters()
        with self.candidates(key, counters=counters) as lookup:
            for hit in lookup:
                return hit.tier
        counts = counters.read(LevelStats)
        causes = ", ".join(f"{count} {cause}" for cause, count in counts.refused.items())
        (reason,) = counts.misses
        return f"{reason} ({causes})" if causes else str(reason)

    def keep(self, entry: Frame) -> None:
        """Save an entry like :meth:`Cache.save`, without counting it; raise if that fails."""
        if not (self._closed or self.settings.mode in ("off", "read-only")):
            self._write(entry, delayed=False, share=True)

    def replace(self, entry: Frame, better: Buffer) -> None:
        """Replace ``entry`` with a frame of the same variant, here and in the remote."""
        self._replaceable.add(entry.digest)
        try:
            self.keep(frame.decode(better))
            if self.settings.mode != "read-only":
                self.local.discard(entry)  # it may have been fetched under the other name
        except Exception as exc:  # noqa: BLE001 - the former entry is as right
            self.problems.raise_or_warn("save", "an entry could not be replaced", exc)

    def withdraw(self, key: str, variant: str) -> None:
        """Remove an entry that was saved here and is delayed, unless its upload is under way."""
        name = entries.variant_name(key, variant)
        try:
            if self._uploads is not None:
                is_removed = self._uploads.cancel_delayed(name)
            else:
                is_removed = self.local.write(lambda disk: disk.delete(name))
        except Exception as exc:  # noqa: BLE001 - then it is uploaded, which does no harm
            self.problems.raise_or_warn(
                "local", "an entry that was replaced cannot be removed", exc
            )
        else:
            if is_removed:
                self.events.dropped.tell(key, variant)

    def set_aside(self, entry: Frame, why: str, *, is_proven: bool) -> str:
        """Use an entry no more that raised at its first call; return what becomes of it elsewhere.

        No process of this machine uses it again. If it ``is_proven`` that the entry is at fault, it
        is also deleted from the remote; otherwise the next entry that is saved here replaces it.
        """
        self.local.mark(entry, why)
        remote, error = self._try_remote()
        if remote is None and error is None:
            return "it is set aside"
        if is_proven and remote is not None and self.settings.mode == "read-write":
            try:
                remote.discard(entries.names_of(entry.header), entry.digest, _DISCARD_S)
            except StoreError as exc:
                error = exc
            else:
                return "it is set aside, and deleted from the bucket"
        why = f" ({error})" if error is not None else ""
        return (
            f"it is set aside on this machine, and stays in the bucket{why}: "
            f"to delete it, run `s3cache rm {entry.header.key}`"
        )

    def contain(self, key: str, variant: str) -> None:
        """Note that a whole graph has a saved FX graph, which other graphs may share too."""
        # So the next process does not fetch it early.
        self.events.dropped.tell(key, variant)
        self._counters_of["fx"].add(contained=1)

    def count_bypass(self, reasons: Iterable[str], kind: EntryKind = "aot") -> None:
        """Count a graph that cannot be cached, by the codes of the reasons."""
        self._counters_of[kind].add(bypassed=1)
        for reason in {*reasons}:
            self._counters_of[kind].add(reason, bypass_reasons=1)

    def count_time_saved(self, seconds: float) -> None:
        """Count the compile time that a hit has saved."""
        self._counters.add(time_saved_s=seconds)

    def record(self, what: Record | Event | dict[str, object]) -> None:
        """Record a lookup or an event, in the background."""
        if self.settings.record:
            self._records.add(what)

    def recorded(self) -> Run:
        """Return the last few hundred lookups of this process, oldest first; any thread."""
        return Run(self._records.run, self._records.held())
