"""A shared compile cache for ``torch.compile`` in S3-compatible object storage.

:func:`enable` turns it on, :func:`check` reports which graphs of a program can be cached, and
:class:`Cache` is the storage engine alone. Stores and their wrappers are in :mod:`s3cache.store`,
the format of entries is in :mod:`s3cache.frame`; :mod:`s3cache.errors` draws the tree of errors.

Importing this package is cheap: names are loaded at their first use.
"""

# Do not import modules of the standard library here: the current directory may have a file with the
# same name, and `python -m s3cache` has it on its path until `__main__.py` removes it.
from s3cache.util import lazy_exports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from s3cache import errors as errors
    from s3cache import frame as frame
    from s3cache import store as store
    from s3cache.cache import Cache as Cache
    from s3cache.cache import Hit as Hit
    from s3cache.cache import Miss as Miss
    from s3cache.cache import NotSaved as NotSaved
    from s3cache.cache import Saved as Saved
    from s3cache.errors import *
    from s3cache.graph import Graph as Graph
    from s3cache.graph import GraphBreak as GraphBreak
    from s3cache.graph import Report as Report
    from s3cache.hooks import active as active
    from s3cache.hooks import check as check
    from s3cache.hooks import disable as disable
    from s3cache.hooks import enable as enable
    from s3cache.hooks import enabled as enabled
    from s3cache.hooks import register_cacheable as register_cacheable
    from s3cache.insight import Difference as Difference
    from s3cache.insight import Explained as Explained
    from s3cache.insight import Explanation as Explanation
    from s3cache.insight import explain as explain
    from s3cache.integrations import flush_at_checkpoint as flush_at_checkpoint
    from s3cache.options import Options as Options
    from s3cache.settings import Mode as Mode
    from s3cache.settings import Settings as Settings
    from s3cache.stats import CacheStats as CacheStats
    from s3cache.stats import Listener as Listener
    from s3cache.stats import Reason as Reason
    from s3cache.stats import TransferEvent as TransferEvent
    from s3cache.store import FileLocation as FileLocation
    from s3cache.store import MemoryLocation as MemoryLocation
    from s3cache.store import S3Options as S3Options
    from s3cache.store import StoreOptions as StoreOptions
    from s3cache.tier import FlushReport as FlushReport
    from s3cache.tier import Prefetch as Prefetch
    from s3cache.tier import PrefetchReport as PrefetchReport
    from s3cache.util import __version__ as __version__
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        "errors",
        "frame",
        "store",
        cache="Cache Hit Miss NotSaved Saved",
        errors="AccessDeniedError CircuitOpenError ClosedError ConfigError CorruptError "
        "CredentialsError DownloadTimeoutError MissError MissingContainerError NoSpaceError "
        "PermanentError PreconditionError ReadOnlyError S3CacheError StoreError TooLargeError "
        "TransientError TruncatedError UnsupportedTorchError UntrustedError",
        insight="Difference Explained Explanation explain",
        graph="Graph GraphBreak Report",
        hooks="active check disable enable enabled register_cacheable",
        integrations="flush_at_checkpoint",
        options="Options",
        settings="Mode Settings",
        stats="CacheStats Listener Reason TransferEvent",
        store="FileLocation MemoryLocation S3Options StoreOptions",
        tier="FlushReport Prefetch PrefetchReport",
        util="__version__",
    )
