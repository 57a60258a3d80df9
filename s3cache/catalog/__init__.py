"""What lies in a store or a local tier: listed, chosen, verified, copied and removed.

For whoever looks after a cache. Nothing of an entry is unpickled, and torch is not needed; what an
entry says of itself was written by whoever could write it.
"""

from s3cache.catalog._items import About, Item, about, read_about, read_head, scan
from s3cache.catalog._manifest import read_manifest
from s3cache.catalog._places import Place, open_place, trust_of
from s3cache.catalog._seen import Seen, Unmatched
from s3cache.catalog._selection import Selection
from s3cache.catalog._work import Tally, copy, remove, verify

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
