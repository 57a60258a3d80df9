"""List, choose, verify, copy and remove what is in a store or a local tier.

No entry is unpickled, and torch is not needed. What an entry says of itself is not verified, beyond
its signatures. Programs are run by :mod:`~s3cache.manage.check`, :mod:`~s3cache.manage.warm` and
:mod:`~s3cache.manage.bench`.
"""

from s3cache.manage._items import About, Item, about, read_about, read_head, read_manifest, scan
from s3cache.manage._selection import Seen, Selection, Unmatched
from s3cache.manage._work import Place, Tally, copy, open_place, remove, trust_of, verify

__all__ = [
    "About",
    "Item",
    "Place",
    "Seen",
    "Selection",
    "Tally",
    "Unmatched",
    "about",
    "copy",
    "open_place",
    "read_about",
    "read_head",
    "read_manifest",
    "remove",
    "scan",
    "trust_of",
    "verify",
]
