"""A shared compile cache for ``torch.compile`` in S3-compatible object storage.

The storage engine's names are here; each is loaded when it is first used, so that importing this
package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from s3cache._version import __version__

if TYPE_CHECKING:
    from s3cache.cache import Cache, Hit, Miss, NotSaved, Saved
    from s3cache.hooks import Report, active, check, disable, enable, enabled, register_cacheable
    from s3cache.settings import Settings
    from s3cache.stats import CacheStats, Reason, TransferEvent
    from s3cache.transfer import FlushReport, Prefetch, PrefetchReport

__all__ = [
    "Cache",
    "CacheStats",
    "FlushReport",
    "Hit",
    "Miss",
    "NotSaved",
    "Prefetch",
    "PrefetchReport",
    "Reason",
    "Report",
    "Saved",
    "Settings",
    "TransferEvent",
    "__version__",
    "active",
    "check",
    "disable",
    "enable",
    "enabled",
    "register_cacheable",
]

_LAZY = {
    "Cache": "cache",
    "CacheStats": "stats",
    "FlushReport": "transfer",
    "Hit": "cache",
    "Miss": "cache",
    "NotSaved": "cache",
    "Prefetch": "transfer",
    "PrefetchReport": "transfer",
    "Reason": "stats",
    "Report": "hooks",
    "Saved": "cache",
    "Settings": "settings",
    "TransferEvent": "stats",
    "active": "hooks",
    "check": "hooks",
    "disable": "hooks",
    "enable": "hooks",
    "enabled": "hooks",
    "register_cacheable": "hooks",
}

# Hidden from type checkers: to them a module with __getattr__ has every attribute there is.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return getattr(import_module(f"s3cache.{_LAZY[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
