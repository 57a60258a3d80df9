"""Moving bytes in the background: the event loop on its thread, uploads, downloads, prefetch."""

from s3cache.transfer._batches import SMALL_BYTES, Batches
from s3cache.transfer._downloads import (
    Downloads,
    DownloadTimeoutError,
    Prefetch,
    PrefetchReport,
)
from s3cache.transfer._events import Listener, Listeners, TransferEvent
from s3cache.transfer._loop import BackgroundLoop, background, before_exit
from s3cache.transfer._uploads import FlushReport, UploadLimits, Uploads

__all__ = [
    "SMALL_BYTES",
    "BackgroundLoop",
    "Batches",
    "DownloadTimeoutError",
    "Downloads",
    "FlushReport",
    "Listener",
    "Listeners",
    "Prefetch",
    "PrefetchReport",
    "TransferEvent",
    "UploadLimits",
    "Uploads",
    "background",
    "before_exit",
]
