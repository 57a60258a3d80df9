"""The outcomes of a lookup and of a save."""

from __future__ import annotations

from dataclasses import dataclass

from s3cache.frame import Frame
from s3cache.stats import Reason, TierName

__all__ = ["Hit", "Miss", "NotSaved", "Saved"]


@dataclass(frozen=True, slots=True)
class Hit:
    """An entry, every section of which matches its digest.

    Attributes:
        tier: which tier had it.
        elapsed_s: how long the lookup took.
    """

    entry: Frame
    tier: TierName
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Miss:
    """No entry, and why; ``error`` is the first thing that went wrong, if anything did."""

    reason: Reason
    elapsed_s: float
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """The entry is acknowledged.

    Attributes:
        durable: it is on the local disk, on record there if it is still to be uploaded, and
            survives this process. If false it is queued in memory only.
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
