"""A shared compile cache for ``torch.compile`` in S3-compatible object storage.

:func:`enable` turns it on, :func:`check` reports which graphs of a program can be cached, and
:class:`Cache` is the storage engine alone. All other names are in modules: results of a cache in
:mod:`s3cache.cache`, stores and their wrappers in :mod:`s3cache.store`, the format of entries in
:mod:`s3cache.frame`, the tree of errors in :mod:`s3cache.errors`, counts in :mod:`s3cache.stats`.

Importing this package is cheap: names are loaded at their first use.
"""

# Do not import modules of the standard library here: the current directory may have a file with the
# same name, and `python -m s3cache` has it on its path until `__main__.py` removes it.
from s3cache.util import lazy_exports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from s3cache.cache import Cache as Cache
    from s3cache.errors import ConfigError as ConfigError
    from s3cache.errors import MissError as MissError
    from s3cache.errors import S3CacheError as S3CacheError
    from s3cache.hooks import active as active
    from s3cache.hooks import check as check
    from s3cache.hooks import disable as disable
    from s3cache.hooks import enable as enable
    from s3cache.hooks import enabled as enabled
    from s3cache.hooks import register_cacheable as register_cacheable
    from s3cache.insight import explain as explain
    from s3cache.settings import Settings as Settings
    from s3cache.store import S3Options as S3Options
    from s3cache.util import __version__ as __version__
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        cache="Cache",
        errors="ConfigError MissError S3CacheError",
        hooks="active check disable enable enabled register_cacheable",
        insight="explain",
        settings="Settings",
        store="S3Options",
        util="__version__",
    )
