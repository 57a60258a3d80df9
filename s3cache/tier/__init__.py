"""Where entries are kept, on disk and in the remote store, and the loop that moves them."""

from s3cache.tier._disk import DiskTier, TierStore
from s3cache.tier._prefetch import Budget, Prefetch, PrefetchReport
from s3cache.tier._remote import BackgroundLoop, RemoteTier, background, before_exit, read_head
from s3cache.tier._uploads import FlushReport, Uploads, cancel_all

__all__ = [
    "BackgroundLoop",
    "Budget",
    "DiskTier",
    "FlushReport",
    "Prefetch",
    "PrefetchReport",
    "RemoteTier",
    "TierStore",
    "Uploads",
    "background",
    "before_exit",
    "cancel_all",
    "read_head",
]
