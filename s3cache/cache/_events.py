"""The events of a cache, to which features subscribe; see :mod:`s3cache.seam`."""

from __future__ import annotations

from s3cache.seam import Notice


class CacheEvents:
    """The events of one process of a cache.

    Attributes:
        finishing: uploads are about to be waited for; subscribers may still save entries.
    """

    def __init__(self, *, strict: bool) -> None:
        self.finishing: Notice[[]] = Notice(strict=strict)
