"""A shared compile cache for ``torch.compile`` in S3-compatible object storage.

:func:`enable` turns it on, :func:`check` says what it can do for a program, and :class:`Cache` is
the storage engine by itself. Stores and their wrappers are in :mod:`s3cache.store`, the format of
entries is in :mod:`s3cache.frame`; :mod:`s3cache.errors` draws the tree of errors.

Importing this package costs next to nothing: each name is loaded when it is first used.
"""

# No module of the standard library is imported here: a file of that name may lie in the current
# directory, which `python -m s3cache` has on its path until `__main__.py` takes it from there.
from s3cache.util import __version__, lazy_exports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from s3cache import errors, frame, store
    from s3cache.cache import Cache, Hit, Miss, NotSaved, Saved, flush_at_checkpoint
    from s3cache.errors import (
        AccessDeniedError,
        CircuitOpenError,
        ClosedError,
        ConfigError,
        CorruptError,
        DownloadTimeoutError,
        MissingContainerError,
        NoSpaceError,
        PermanentError,
        PreconditionError,
        ReadOnlyError,
        S3CacheError,
        StoreError,
        TransientError,
        TruncatedError,
        UnsupportedTorchError,
        UntrustedError,
    )
    from s3cache.graph import Graph, GraphBreak, Report
    from s3cache.hooks import (
        active,
        check,
        disable,
        enable,
        enabled,
        register_cacheable,
    )
    from s3cache.insight import Difference, Explained, Explanation, explain
    from s3cache.settings import Mode, Options, Settings
    from s3cache.stats import CacheStats, Listener, Reason, TransferEvent
    from s3cache.store import FileLocation, MemoryLocation, S3Options, StoreOptions
    from s3cache.tier import FlushReport, Prefetch, PrefetchReport
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        "errors",
        "frame",
        "store",
        cache="Cache flush_at_checkpoint Hit Miss NotSaved Saved",
        errors="AccessDeniedError CircuitOpenError ClosedError ConfigError CorruptError "
        "DownloadTimeoutError MissingContainerError NoSpaceError PermanentError PreconditionError "
        "ReadOnlyError S3CacheError StoreError TransientError TruncatedError UnsupportedTorchError "
        "UntrustedError",
        insight="Difference Explained Explanation explain",
        graph="Graph GraphBreak Report",
        hooks="active check disable enable enabled register_cacheable",
        settings="Mode Options Settings",
        stats="CacheStats Listener Reason TransferEvent",
        store="FileLocation MemoryLocation S3Options StoreOptions",
        tier="FlushReport Prefetch PrefetchReport",
    )

__all__ = [
    "AccessDeniedError",
    "Cache",
    "CacheStats",
    "CircuitOpenError",
    "ClosedError",
    "ConfigError",
    "CorruptError",
    "Difference",
    "DownloadTimeoutError",
    "Explained",
    "Explanation",
    "FileLocation",
    "FlushReport",
    "Graph",
    "GraphBreak",
    "Hit",
    "Listener",
    "MemoryLocation",
    "Miss",
    "MissingContainerError",
    "Mode",
    "NoSpaceError",
    "NotSaved",
    "Options",
    "PermanentError",
    "PreconditionError",
    "Prefetch",
    "PrefetchReport",
    "ReadOnlyError",
    "Reason",
    "Report",
    "S3CacheError",
    "S3Options",
    "Saved",
    "Settings",
    "StoreError",
    "StoreOptions",
    "TransferEvent",
    "TransientError",
    "TruncatedError",
    "UnsupportedTorchError",
    "UntrustedError",
    "__version__",
    "active",
    "check",
    "disable",
    "enable",
    "enabled",
    "errors",
    "explain",
    "flush_at_checkpoint",
    "frame",
    "register_cacheable",
    "store",
]
