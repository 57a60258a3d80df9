"""List, choose, verify, copy and remove entries of a store or a local tier.

No entry is unpickled, and torch is not needed. The headers of entries are not verified beyond
their signatures. :mod:`~s3cache.manage.check`, :mod:`~s3cache.manage.warm` and
:mod:`~s3cache.manage.bench` run programs.
"""

from s3cache.manage._scan import concurrently, read_head, scan
from s3cache.manage._selection import (
    FilterFeedback,
    HeaderSummary,
    Item,
    Selection,
    read_manifest,
)
from s3cache.manage._work import (
    BatchResult,
    Place,
    copy,
    open_place,
    remove,
    trust_of,
    url_of,
    verify,
)

__all__ = [
    "BatchResult",
    "FilterFeedback",
    "HeaderSummary",
    "Item",
    "Place",
    "Selection",
    "concurrently",
    "copy",
    "open_place",
    "read_head",
    "read_manifest",
    "remove",
    "scan",
    "trust_of",
    "url_of",
    "verify",
]
