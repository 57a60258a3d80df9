"""Moving bytes in the background: the event loop on its thread, uploads, prefetching."""

from s3cache.transfer._loop import (
    SMALL_BYTES,
    BackgroundLoop,
    Deadline,
    background,
    before_exit,
    cancel_all,
)
from s3cache.transfer._prefetch import Budget, Prefetch, Prefetches, PrefetchReport
from s3cache.transfer._uploads import FlushReport, UploadLimits, Uploads

__all__ = [
    "SMALL_BYTES",
    "BackgroundLoop",
    "Budget",
    "Deadline",
    "FlushReport",
    "Prefetch",
    "PrefetchReport",
    "Prefetches",
    "UploadLimits",
    "Uploads",
    "background",
    "before_exit",
    "cancel_all",
]
