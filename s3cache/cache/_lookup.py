"""One lookup: the places it searches, their order, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from s3cache import entries
from s3cache.errors import (
    CorruptError,
    Reason,
    UntrustedError,
    is_device_trouble,
    is_machine_trouble,
    reason_for,
)
from s3cache.frame import Frame
from s3cache.stats import Counters, TierName
from s3cache.tier import LocalTier, RemoteTier
from s3cache.util.logs import Problems

_T = TypeVar("_T")

# A writer can put any number of entries under a key. These bound how many useless entries are
# fetched, and how many in all. Most keys have one entry, those with dynamic shapes a few.
_MAX_REJECTED = 32
_MAX_FETCHED = 256


@dataclass(frozen=True, slots=True)
class Hit:
    """A verified entry: every section matches its digest.

    Attributes:
        tier: the tier it came from.
        elapsed_s: how long the lookup took.
    """

    entry: Frame
    tier: TierName
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Miss:
    """A miss and its reason; ``error`` is the first error, if there was one."""

    reason: Reason
    elapsed_s: float
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """The entry was accepted.

    Attributes:
        durable: the entry is on the local disk and survives this process, as does the record of
            a pending upload. If false, it is queued in memory only.
        elapsed_s: how long the save took.
    """

    durable: bool
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class NotSaved:
    """The entry was refused, and why."""

    reason: Reason
    elapsed_s: float
    error: Exception | None = None


class Work(Protocol):
    """The right to make a missing entry, for which other processes wait."""

    def release(self, *, published: bool) -> None:
        """Let the others go on: they load the entry if it is ``published``, or make it."""

    def drop(self) -> None:
        """Let the others go on, one after another; never waits."""


@dataclass(frozen=True)
class Retry:
    """Where a lookup searches again after a miss: another process may have saved an entry.

    Attributes:
        in_remote: whether to search the remote too, after the local tier.
        reason: why the lookup misses if nothing is found; None for the reason so far.
        in_vain: called if nothing is found.
        work: to end when this process has made the entry; None if no process waits for it.
    """

    in_remote: bool = False
    reason: Reason | None = None
    in_vain: Callable[[], object] | None = None
    work: Work | None = None


@dataclass(eq=False)
class CandidateLookup:
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

    _key: str
    _skip: Reason | None  # the reason not to search at all, if any
    _local: LocalTier
    _asks_local: bool
    _open_remote: Callable[[], RemoteTier | None]  # may raise
    _counters: Counters
    _problems: Problems
    _timeout_s: float  # for the remote, in all
    _used: Callable[[str, str], object]  # called with key and variant of the accepted entry
    # Called if no entry is chosen: may wait for one, and says where to search again.
    _retry: Callable[[], Retry | None] | None = None
    # Whether to go through the entries even if none may be accepted.
    _all: bool = False

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self._timeout_s
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

        Raises:
            S3CacheError: with ``strict``, the lookup misses for a reason other than absence.
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
        self._used(self._key, hit.entry.header.variant)

    def force_miss(self, reason: Reason) -> None:
        """End as a miss with ``reason``, though an entry might fit."""
        self._accepted, self._reason = None, reason

    @property
    def is_absent(self) -> bool:
        """Whether no tier had an entry under the key."""
        return self._reason is Reason.ABSENT and not self._offered and not self._rejected

    def reject(self, hit: Hit, error: Exception) -> None:
        """Set ``hit`` aside: it is sound but cannot be used.

        If this machine or its device is at fault, the entry stays.
        """
        if is_machine_trouble(error):
            self._reason = Reason.MACHINE
            self._problems.warn("machine", "an entry cannot be used on this machine now", error)
        elif is_device_trouble(error):
            self._reason = Reason.DEVICE
            self._problems.warn("device", "an entry's kernels cannot be loaded here now", error)
        else:
            self._reason = Reason.CORRUPT
            self._local.set_aside(hit.entry, error)

    def take_back(self) -> bool:
        """Count a lookup that ended with a hit as a miss; return False if it was none."""
        hit, self._accepted, self._reason = self._accepted, None, Reason.CORRUPT
        if hit is not None:
            self._counters.add(hit.tier, hits=-1, hit_bytes=-hit.entry.size)
            self._counters.add(Reason.CORRUPT, misses=1)
        return hit is not None

    def fail(self, error: Exception) -> None:
        """Note a failure of the caller's check or of reading an entry.

        Raises:
            Exception: ``error``, with ``strict``.
        """
        self._last_error = error
        if self._error is None:
            self._error, self._reason = error, reason_for(error)
        self._problems.met("lookup", "a lookup failed and counts as a miss", error)

    def close(self) -> Hit | Miss:
        """Return the outcome; the first call counts it."""
        hit = self._accepted
        if not self._closed:
            self._closed = True
            if hit is None:
                reason = self._skip or self._reason
                self._counters.add(reason, misses=1, miss_latency=self._elapsed_s)
                if self._retried is not None and self._retried.in_vain is not None:
                    self._attempt(self._retried.in_vain)
            else:
                counts = {"hits": 1, "hit_bytes": hit.entry.size, "hit_latency": self._elapsed_s}
                self._counters.add(hit.tier, **counts)
        return hit or Miss(self._skip or self._reason, self._elapsed_s, self._error)

    def __enter__(self) -> CandidateLookup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the search

    def _candidates(self) -> Iterator[tuple[Frame, TierName]]:
        if self._asks_local:
            yield from self._in_local()
        remote = self._attempt(self._open_remote)
        if remote is not None:
            yield from self._in_remote(remote)
        elif (
            self._reason is Reason.ABSENT and self._asks_local and (error := self._local.read_error)
        ):
            self._error, self._reason = error, reason_for(error)  # the entry may exist
        if self._retry is not None and self._asks_local:
            self._retried = retry = self._attempt(self._retry)
            if retry is None:
                return
            self._deadline = time.monotonic() + self._timeout_s
            yield from self._in_local()  # another process may have saved it
            if retry.in_remote and remote is not None:
                yield from self._in_remote(remote)
            self._reason = retry.reason or self._reason

    def _in_local(self) -> Iterator[tuple[Frame, TierName]]:
        # Most entries have one of these two names; only others need a listing.
        usual = (self._first, entries.variant_name(self._key, ""))
        found, offered = self._attempt(lambda: self._local.search(self._key, usual)), ""
        if isinstance(found, tuple):
            offered, data, entry = found
            entry = entry or self._attempt(lambda: self._local.verify(offered, data))
            yield from self._offer("local", offered, entry)
            found = self._attempt(lambda: self._local.search(self._key, ()))
        for info in found if isinstance(found, list) else ():
            if info.key != offered:
                yield from self._load(info.key)

    def _load(self, name: str) -> Iterator[tuple[Frame, TierName]]:
        yield from self._offer("local", name, self._attempt(lambda: self._local.load(name)))

    def _in_remote(self, remote: RemoteTier) -> Iterator[tuple[Frame, TierName]]:
        list_names = remote.names
        may_have_landed = self._asks_local and not self._has_first
        if may_have_landed and self._attempt(lambda: bool(self._local.present([self._first]))):
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
        for name in self._attempt(lambda: list_names(self._key, self._left_s())) or ():
            if self._rejected >= _MAX_REJECTED or fetched >= _MAX_FETCHED:
                return
            # The copy of this machine has been offered already.
            if name not in self._offered:
                fetched += 1
                yield from self._offer("remote", name, self._fetch(remote, name))

    def _fetch(self, remote: RemoteTier, name: str) -> Frame | None:
        # After a rejected entry, check signatures before downloading others.
        suspect = self._rejected > 0
        return self._attempt(lambda: remote.load(name, self._left_s(), suspect=suspect))

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

    def _attempt(self, call: Callable[[], _T]) -> _T | None:
        """Return the result of ``call``, or ``None`` if it fails: the lookup goes on."""
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
            self._rejected += isinstance(exc, CorruptError)
            self.fail(exc)
        return None
