"""The cache: the disk tier before the remote tier, and the only place that swallows errors.

Packages below this one raise. Here an error becomes a :class:`Miss` with its reason, a count and
one warning. With ``strict`` it is raised.

:class:`Cache` is public. It has an :class:`Engine`, which torch's hooks and features use.
:func:`current_cache` is the one that torch.compile uses, or used last.
"""

from __future__ import annotations

from s3cache.cache._cache import Cache as Cache
from s3cache.cache._cache import open_for_torch as open_for_torch
from s3cache.cache._engine import CandidateLookup as CandidateLookup
from s3cache.cache._engine import Engine as Engine
from s3cache.cache._results import Hit as Hit
from s3cache.cache._results import Miss as Miss
from s3cache.cache._results import NotSaved as NotSaved
from s3cache.cache._results import Retry as Retry
from s3cache.cache._results import Saved as Saved
from s3cache.cache._results import Work as Work
from s3cache.records import Run

_current: Cache | None = None


def set_current(cache: Cache) -> None:
    """Make ``cache`` the one that was enabled last."""
    global _current
    _current = cache


def current_cache() -> Cache | None:
    """Return the cache that was enabled last. Its counts remain after it is disabled."""
    return _current


def recorded() -> Run | None:
    """Return the latest lookups of the cache that was enabled last."""
    return None if _current is None else _current.engine.recorded()
