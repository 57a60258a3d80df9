"""List, select, verify, copy and remove entries of a store or a local tier; run programs.

Entries are never unpickled, and torch is not needed. Of headers, only signatures are verified.
:mod:`~s3cache.manage.programs` checks and warms programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.util import lazy_exports

if TYPE_CHECKING:
    from s3cache.manage._bulk import BatchResult as BatchResult
    from s3cache.manage._bulk import EntryLocation as EntryLocation
    from s3cache.manage._bulk import Item as Item
    from s3cache.manage._bulk import Scan as Scan
    from s3cache.manage._bulk import Selection as Selection
    from s3cache.manage._bulk import age_beyond as age_beyond
    from s3cache.manage._bulk import copy as copy
    from s3cache.manage._bulk import open_place as open_place
    from s3cache.manage._bulk import read_manifest as read_manifest
    from s3cache.manage._bulk import remove as remove
    from s3cache.manage._bulk import verify as verify
    from s3cache.tier import read_head as read_head
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        _bulk="BatchResult EntryLocation Item Scan Selection age_beyond copy open_place read_head "
        "read_manifest remove verify",
    )
