"""The events of a cache, to which features subscribe; see :mod:`s3cache.seam`."""

from __future__ import annotations

from s3cache.seam import Notice


class CacheEvents:
    """The events of one process of a cache.

    Attributes:
        used: an entry under a key and with a variant was used, or was saved to be shared.
        finishing: uploads are about to be waited for; subscribers may still save entries.
    """

    def __init__(self, *, strict: bool) -> None:
        self.used: Notice[[str, str]] = Notice(strict=strict)
        self.finishing: Notice[[]] = Notice(strict=strict)
