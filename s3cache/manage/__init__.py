"""List, choose, verify, copy and remove entries of a store or a local tier.

No entry is unpickled, and torch is not needed. The headers of entries are not verified beyond
their signatures. :mod:`~s3cache.manage.programs` and :mod:`~s3cache.manage.bench` run programs.
"""

from s3cache.manage._bulk import (
    BatchResult,
    Place,
    Scan,
    concurrently,
    copy,
    open_place,
    read_head,
    remove,
    trust_of,
    url_of,
    verify,
)
from s3cache.manage._selection import Item, Selection, header_values, read_manifest

__all__ = [
    "BatchResult",
    "Item",
    "Place",
    "Scan",
    "Selection",
    "concurrently",
    "copy",
    "header_values",
    "open_place",
    "read_head",
    "read_manifest",
    "remove",
    "trust_of",
    "url_of",
    "verify",
]
