"""The cache: the disk tier before the remote one, and the only place that swallows errors.

Below this package what a caller waits for raises; here an error becomes a :class:`Miss` with its
reason, a count and one warning, or, with ``strict``, is raised after all.

:class:`Cache` is for everybody. :class:`Engine` is a cache with what torch's hooks need beside,
and :func:`latest` the one that torch.compile was given last.
"""

from s3cache.cache._cache import Cache, Engine
from s3cache.cache._checkpoints import flush_at_checkpoint
from s3cache.cache._latest import announce, latest, recorded, with_each
from s3cache.cache._lookup import Hit, JudgedLookup, Miss, NotSaved, Saved

__all__ = [
    "Cache",
    "Engine",
    "Hit",
    "JudgedLookup",
    "Miss",
    "NotSaved",
    "Saved",
    "announce",
    "flush_at_checkpoint",
    "latest",
    "recorded",
    "with_each",
]
