"""The events of a cache, to which features subscribe; see :mod:`s3cache.seam`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.seam import Notice, Question

if TYPE_CHECKING:
    from s3cache.cache._lookup import Retry
    from s3cache.stats import EntryKind
    from s3cache.tier import RemoteTier


class CacheEvents:
    """The events of one process of a cache.

    Attributes:
        used: an entry was accepted by a lookup, or saved to be shared: its key and variant.
        dropped: an entry that was used is not needed by itself: its key and variant.
        missed: no entry of a kind is under a key, and the process will make one: it may wait for
            at most so many seconds, and search again.
        remote_opened: this process has opened the remote.
        finishing: uploads are about to be waited for; subscribers may still save entries.
    """

    def __init__(self, *, strict: bool) -> None:
        self.used: Notice[[str, str]] = Notice(strict=strict)
        self.dropped: Notice[[str, str]] = Notice(strict=strict)
        self.missed: Question[[str, EntryKind, float], Retry] = Question(strict=strict)
        self.remote_opened: Notice[[RemoteTier]] = Notice(strict=strict)
        self.finishing: Notice[[]] = Notice(strict=strict)
