"""Where entries are kept, on disk and in the remote store, and the loop that moves them."""

from s3cache.tier._disk import DiskTier, TierStore
from s3cache.tier._local import LocalTier
from s3cache.tier._loop import (
    SMALL_BYTES,
    BackgroundLoop,
    Deadline,
    background,
    before_exit,
    cancel_all,
)
from s3cache.tier._prefetch import Budget, Prefetch, Prefetches, PrefetchReport
from s3cache.tier._remote import RemoteTier
from s3cache.tier._uploads import FlushReport, UploadLimits, Uploads

__all__ = [
    "SMALL_BYTES",
    "BackgroundLoop",
    "Budget",
    "Deadline",
    "DiskTier",
    "FlushReport",
    "LocalTier",
    "Prefetch",
    "PrefetchReport",
    "Prefetches",
    "RemoteTier",
    "TierStore",
    "UploadLimits",
    "Uploads",
    "background",
    "before_exit",
    "cancel_all",
]
