"""Explain misses, report what was looked up, and check an installation.

:func:`explain` finds the entry nearest to a lookup that missed and shows how its key differs.
:func:`sum_up` counts what processes recorded, :func:`page` and :func:`trace` show it, and
:func:`manifest` has the keys that were used. :func:`examine` is the doctor: a verdict for each
thing that a cache needs, and a fix where it fails.
"""

from s3cache.insight._differences import Difference, differences
from s3cache.insight._doctor import Check, Name, examine
from s3cache.insight._explain import Explained, Explanation, explain
from s3cache.insight._report import is_counted, manifest, name_of, page, sum_up, trace

__all__ = [
    "Check",
    "Difference",
    "Explained",
    "Explanation",
    "Name",
    "differences",
    "examine",
    "explain",
    "is_counted",
    "manifest",
    "name_of",
    "page",
    "sum_up",
    "trace",
]
