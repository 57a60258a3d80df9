"""Where entries are kept, on disk and in the remote store, and the loop that moves them."""

from s3cache.tier._disk import DiskTier
from s3cache.tier._loop import (
    BackgroundLoop,
    Budget,
    Deadline,
    Prefetch,
    Prefetches,
    PrefetchReport,
    background,
    before_exit,
    cancel_all,
)
from s3cache.tier._tiers import LocalTier, RemoteTier, TierStore
from s3cache.tier._uploads import FlushReport, Uploads

__all__ = [
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
    "Uploads",
    "background",
    "before_exit",
    "cancel_all",
]
