"""The cache: the disk tier before the remote one, and the only place that swallows errors.

Below this package what a caller waits for raises; here an error becomes a :class:`Miss` with its
reason, a count and one warning, or, with ``strict``, is raised after all.

:class:`Cache` is for everybody. :class:`Engine` is a cache with what torch's hooks need beside,
and :func:`current_cache` the one that torch.compile was given last.
"""

from s3cache.cache._cache import Cache
from s3cache.cache._engine import (
    Engine,
    current_cache,
    flush_at_checkpoint,
    on_each_cache,
    recorded,
    set_current,
)
from s3cache.cache._lookup import CandidateLookup, Hit, Miss, NotSaved, Saved

__all__ = [
    "Cache",
    "CandidateLookup",
    "Engine",
    "Hit",
    "Miss",
    "NotSaved",
    "Saved",
    "current_cache",
    "flush_at_checkpoint",
    "on_each_cache",
    "recorded",
    "set_current",
]
