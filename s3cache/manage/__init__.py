"""List, choose, verify, copy and remove entries of a store or a local tier; run programs.

No entry is unpickled, and torch is not needed. The headers of entries are not verified beyond
their signatures. :mod:`~s3cache.manage.programs` checks, warms and measures programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.util import lazy_exports

if TYPE_CHECKING:
    from s3cache.manage._bulk import (
        BatchResult,
        Place,
        Scan,
        concurrently,
        copy,
        open_place,
        remove,
        url_of,
        verify,
    )
    from s3cache.manage._selection import Item, Selection, read_manifest
    from s3cache.tier import read_head
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        _bulk="BatchResult Place Scan concurrently copy open_place read_head remove url_of verify",
        _selection="Item Selection read_manifest",
    )

__all__ = [
    "BatchResult",
    "Item",
    "Place",
    "Scan",
    "Selection",
    "concurrently",
    "copy",
    "open_place",
    "read_head",
    "read_manifest",
    "remove",
    "url_of",
    "verify",
]
