"""What lies in a store or a local tier: listed, chosen, verified, copied and removed.

For whoever looks after a cache. Nothing of an entry is unpickled, and torch is not needed; what an
entry says of itself was written by whoever could write it.
"""

from s3cache.catalog._items import About, Item, about, read_about, read_head, read_manifest, scan
from s3cache.catalog._selection import Seen, Selection, Unmatched
from s3cache.catalog._work import Place, Tally, copy, open_place, remove, trust_of, verify

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
