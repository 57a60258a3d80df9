"""The cache: the disk tier before the remote tier, and the only place that swallows errors.

Packages below this one raise. Here an error becomes a :class:`Miss` with its reason, a count and
one warning. With ``strict`` it is raised.

:class:`Cache` is public. :class:`Engine` adds the methods that torch's hooks need.
:func:`current_cache` is the cache that torch.compile used last.
"""

from __future__ import annotations

from s3cache.cache._cache import Cache as Cache
from s3cache.cache._cache import Engine as Engine
from s3cache.cache._lookup import CandidateLookup as CandidateLookup
from s3cache.cache._lookup import Hit as Hit
from s3cache.cache._lookup import Miss as Miss
from s3cache.cache._lookup import NotSaved as NotSaved
from s3cache.cache._lookup import Retry as Retry
from s3cache.cache._lookup import Saved as Saved
from s3cache.cache._lookup import Work as Work
from s3cache.records import Run

_current: Cache | None = None


def set_current(cache: Cache) -> None:
    global _current
    _current = cache


def current_cache() -> Cache | None:
    """Return the cache that was enabled last. Its counts remain after it is disabled."""
    return _current


def recorded() -> Run | None:
    """Return the latest lookups of the cache that was enabled last."""
    return _current.recorded() if isinstance(_current, Engine) else None
