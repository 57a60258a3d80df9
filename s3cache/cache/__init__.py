"""The cache: the disk tier before the remote tier, and the only place that swallows errors.

Packages below this one raise. Here an error becomes a :class:`Miss` with its reason, a count and
one warning; with ``strict`` it is raised. :class:`Cache` is public. It has an :class:`Engine`,
which torch's hooks and features use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from s3cache import entries
from s3cache.cache._engine import CandidateLookup as CandidateLookup
from s3cache.cache._engine import Engine as Engine
from s3cache.cache._results import Hit as Hit
from s3cache.cache._results import Miss as Miss
from s3cache.cache._results import NotSaved as NotSaved
from s3cache.cache._results import Retry as Retry
from s3cache.cache._results import Saved as Saved
from s3cache.cache._results import Work as Work
from s3cache.errors import ConfigError
from s3cache.frame import Frame
from s3cache.seam import Feature, features
from s3cache.settings import Settings, warn_of_unknown_variables
from s3cache.stats import CacheStats, Listener
from s3cache.store import Buffer, Store, open_store, parse_url
from s3cache.tier import FlushReport, Prefetch

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from s3cache.options import Options


class Cache:
    """Frames under keys, on this machine and in a bucket.

    Any thread may use it; listeners must not wait for it. A forked child has its own connections,
    background thread, counts and listeners.

    Args:
        open_remote: opens the remote store, once in each process. ``None`` for no remote.
        identity: a canonical name of the remote. The local tier keeps entries of different remotes
            apart, because they may not be equally trusted.
        used: the features that serve this cache, those of torch's hooks.

    Raises:
        ConfigError: the configured local directory is not safe to use; with ``strict``, also the
            default one.
        StoreError: with ``strict``, the local directory cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        open_remote: Callable[[], Store] | None = None,
        identity: str = "",
        used: Sequence[Feature] = (),
    ) -> None:
        #: What torch's hooks use, which may change in each release.
        self.engine = Engine(settings, open_remote=open_remote, identity=identity, used=used)

    @classmethod
    def open(cls, url: str | None = None, **options: Unpack[Options]) -> Self:
        """Open the cache that ``url``, ``options`` and the environment describe.

        ``options`` are those of :class:`~s3cache.settings.Settings` and of the store. Raises
        ConfigError if the URL, an option or an environment variable cannot be used.
        """
        return cls._open(url, options)

    @classmethod
    def _open(cls, url: str | None, options: Options, used: Sequence[Feature] = ()) -> Self:
        settings, store_options = Settings.load(url, **options)
        warn_of_unknown_variables()
        where = settings.url
        if where is None:
            for name in store_options:
                raise ConfigError(f"option {name}", "needs a URL", "give a URL too")
            return cls(settings, used=used)
        identity = parse_url(where, **store_options).identity
        open_remote = partial(open_store, where, **store_options)
        cache = cls(settings, open_remote=open_remote, identity=identity, used=used)
        cache.start()
        return cache

    @property
    def settings(self) -> Settings:
        """The settings of the cache."""
        return self.engine.settings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lookup(self, key: str, accept: Callable[[Frame], bool] | None = None) -> Hit | Miss:
        """Return the first entry under ``key`` that ``accept`` accepts; by default any entry.

        The local tier is searched first, then the remote, for at most ``lookup_timeout_s``. An
        entry that arrives later is still stored in the local tier. Returned entries are verified.
        Raises ConfigError if ``key`` is not legal, and S3CacheError if a ``strict`` lookup misses
        for a reason other than absence.
        """
        return self.engine.lookup(key, accept)

    def prefetch(self, keys: Iterable[str]) -> Prefetch:
        """Fetch the first entry of each key into the local tier, in the background.

        A lookup waits for a download that is under way. Without a local tier or a remote, this does
        nothing.
        """
        return self.engine.prefetch(keys)

    def save(self, key: str, entry: Frame | Buffer) -> Saved | NotSaved:
        """Save ``entry`` and share it, without waiting for the network.

        On return it is on the local disk, with its upload pending. Entries with different variants
        are kept side by side. An entry replaces a local one with the same variant. A remote one
        stays, unless ``recache`` is set or it is known to be damaged.

        Raises:
            ConfigError, CorruptError: ``entry`` is not a sound frame, or does not have ``key``.
            S3CacheError: with ``strict``, it cannot be saved for another reason.
        """
        return self.engine.save(key, entry)

    def remove(self, key: str) -> int:
        """Remove all entries under ``key``, here and in the remote; return their number.

        Pending entries are uploaded first, so that none comes back. Other machines keep their local
        copies. Raises StoreError if a tier fails.
        """
        return self.engine.remove_all(entries.name_prefix(entries.check_key(key)))

    def clear(self) -> int:
        """Remove all entries of this cache, like :meth:`remove` for one key."""
        return self.engine.remove_all(entries.NAMES)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with each transfer, on any thread; return a function that ends this."""
        return self.engine.subscribe(listener)

    def stats(self) -> CacheStats:
        """Return the counts so far. They remain after the cache is closed."""
        return self.engine.stats()

    def start(self) -> None:
        """Connect in the background now, and begin to upload pending entries of other processes.

        Raises ConfigError if the remote cannot be used as it is configured, and S3CacheError if it
        cannot be opened and the settings are ``strict``.
        """
        self.engine.start()

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        """Wait at most ``timeout_s`` until all saved entries are uploaded; report what remains.

        With ``strict``, raise S3CacheError if the remote cannot be opened.
        """
        return self.engine.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> FlushReport:
        """Flush, by default for at most ``exit_timeout_s``; leave the rest to the next process."""
        return self.engine.close(timeout_s)


def open_for_torch(url: str | None, options: Options) -> Cache:
    """Open a cache like :meth:`Cache.open`, with all features."""
    return Cache._open(url, options, features())


_current: Cache | None = None


def set_current(cache: Cache) -> None:
    """Make ``cache`` the one that was enabled last."""
    global _current
    _current = cache


def current_cache() -> Cache | None:
    """Return the cache that was enabled last. Its counts remain after it is disabled."""
    return _current
