"""The cache: a local tier before a remote one, and the only place that swallows errors.

Below this package everything raises; here an error becomes a :class:`Miss` with its reason, a count
and one warning, or, with ``strict``, is raised after all.
"""

from s3cache.cache._cache import Cache
from s3cache.cache._results import Hit, Miss, NotSaved, Saved

__all__ = ["Cache", "Hit", "Miss", "NotSaved", "Saved"]
