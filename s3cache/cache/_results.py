"""The results of lookups and saves, and the events of a cache, to which features subscribe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from s3cache.errors import Reason
from s3cache.frame import Frame
from s3cache.seam import Notice, Question
from s3cache.stats import EntryKind, TierName

if TYPE_CHECKING:
    from s3cache.tier import RemoteTier


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


class CacheEvents:
    """The events of one process of a cache.

    Attributes:
        used: an entry was accepted by a lookup, or saved to be shared: its key and variant.
        dropped: an entry that was used is not needed by itself: its key and variant.
        missed: no entry of a kind is under a key, and the process will make one: it may wait for
            at most so many seconds, and search again.
        remote_opened: this process has opened the remote.
        finishing: a flush or the exit is about to wait; subscribers may still save entries.
    """

    def __init__(self, *, strict: bool) -> None:
        self.used: Notice[[str, str]] = Notice(strict=strict)
        self.dropped: Notice[[str, str]] = Notice(strict=strict)
        self.missed: Question[[str, EntryKind, float], Retry] = Question(strict=strict)
        self.remote_opened: Notice[[RemoteTier]] = Notice(strict=strict)
        self.finishing: Notice[[]] = Notice(strict=strict)
