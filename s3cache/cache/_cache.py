"""The cache, as its users see it, and which one is meant where none is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from s3cache.cache._engine import Engine
from s3cache.cache._lookup import Hit, Miss, NotSaved, Saved
from s3cache.frame import Frame
from s3cache.records import Run
from s3cache.settings import Options, Settings
from s3cache.stats import CacheStats, Listener
from s3cache.store import Buffer, Store
from s3cache.transfer import FlushReport, Prefetch

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Cache", "announce", "cache_over", "latest", "recorded", "with_each"]


class Cache:
    """Frames under keys, on this machine and in a bucket.

    Any thread may use it, but listeners may not wait for it. In a forked child it has
    connections, a background thread, counts and listeners of the child's own.

    Args:
        settings: how to behave.
        open_remote: makes the remote store, once in each process. ``None`` for no remote.
        identity: a canonical name of the place behind ``open_remote``. The local tier keeps
            entries of different places apart: they need not be equally trusted.

    Raises:
        ConfigError: the local directory is not safe to use.
        StoreError: with ``strict``, the local directory cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        open_remote: Callable[[], Store] | None = None,
        identity: str = "",
    ) -> None:
        self._engine = Engine(settings, open_remote=open_remote, identity=identity)

    @staticmethod
    def open(url: str | None = None, **options: Unpack[Options]) -> Cache:
        """The cache that ``url``, ``options`` and the environment describe.

        ``options`` are those of :class:`~s3cache.settings.Settings` and of the store. The remote
        is connected to in the background.

        Raises:
            ConfigError: the URL, an option or an environment variable cannot be used.
        """
        return cache_over(Engine.open(url, **options))

    @property
    def settings(self) -> Settings:
        """How it behaves."""
        return self._engine.settings

    def lookup(self, key: str, accept: Callable[[Frame], bool] | None = None) -> Hit | Miss:
        """The first entry under ``key`` that ``accept`` accepts; any, if it is not given.

        The local tier is asked first, then the remote, for ``lookup_timeout_s`` at most; what
        arrives later still lands in the local tier. Whatever is returned was verified.

        Raises:
            ConfigError: ``key`` is not legal.
            S3CacheError: with ``strict``, whatever would have made it a miss but absence.
        """
        return self._engine.lookup(key, accept)

    def save(self, key: str, entry: Frame | Buffer) -> Saved | NotSaved:
        """Keep ``entry`` and share it, without waiting for the network.

        On return it is on the local disk, on record as to be uploaded. Entries with one key and
        different variants live side by side. One with the same variant replaces the local one;
        the remote one stays, unless ``recache`` is set or it is known to be damaged.

        Raises:
            ConfigError: ``key`` is not legal, or not the one in the frame.
            CorruptError: ``entry`` is no well-formed frame.
            S3CacheError: with ``strict``, whatever else keeps it from being saved.
        """
        return self._engine.save(key, entry)

    def prefetch(self, keys: Iterable[str]) -> Prefetch:
        """Fetch the first entry of each key into the local tier, in the background.

        A lookup joins what is in flight. Without a local tier or a remote there is nothing to do,
        and the prefetch is complete at once.

        Raises:
            ConfigError: one of ``keys`` is not legal.
        """
        return self._engine.prefetch(keys)

    def remove(self, key: str) -> int:
        """Remove all entries under ``key``, here and in the remote; returns how many there were.

        What is still to be uploaded is uploaded first, so that nothing comes back later; other
        machines keep what they have. The remote has to allow it: those who train need not be able
        to delete.

        Raises:
            ConfigError: ``key`` is not legal.
            StoreError: a tier refuses, or cannot do it; what was removed by then stays so.
        """
        return self._engine.remove(key)

    def clear(self) -> int:
        """Remove all entries of this cache, as :meth:`remove` does those of one key."""
        return self._engine.clear()

    def start(self) -> None:
        """Connect in the background now, and begin to upload what dead processes have left.

        Raises:
            ConfigError: the remote cannot be used as it is configured.
            S3CacheError: with ``strict``, the remote cannot be opened.
        """
        self._engine.start()

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        """Wait until all that was saved is uploaded, at most ``timeout_s``; says what remains.

        Raises:
            RuntimeError: called by a listener, on the thread that uploads.
            S3CacheError: with ``strict``, the remote cannot be opened.
        """
        return self._engine.flush(timeout_s)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` called with each :class:`TransferEvent`, on any thread.

        Returns:
            A function that ends this.
        """
        return self._engine.subscribe(listener)

    def stats(self) -> CacheStats:
        """Counts so far, exact but for what happens meanwhile; those of a closed cache stay."""
        return self._engine.stats()

    def close(self, timeout_s: float | None = None) -> FlushReport:
        """Flush, for ``exit_timeout_s`` unless told otherwise, and let go of everything.

        What then remains is on record for the next process, as far as it was durable. A second
        call does nothing.
        """
        return self._engine.close(timeout_s)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cache_over(engine: Engine) -> Cache:
    """The cache that shows ``engine``: the two are one, closed together."""
    cache = Cache.__new__(Cache)
    cache._engine = engine
    return cache


_latest: Cache | None = None
_waiting: list[Callable[[Cache], None]] = []


def announce(cache: Cache) -> None:
    """Make ``cache`` the latest one, and call the functions that wait for one."""
    global _latest
    _latest = cache
    for act in [*_waiting]:
        act(cache)


def latest() -> Cache | None:
    """The cache that was enabled last, also where it is off again: its counts stay readable."""
    return _latest


def with_each(act: Callable[[Cache], None]) -> Callable[[], None]:
    """Have ``act`` called with the cache that was enabled last, and with each one from now on.

    Returns:
        A function that ends this.
    """
    if _latest is not None:
        act(_latest)
    _waiting.append(act)
    return lambda: _waiting.remove(act)


def recorded() -> Run | None:
    """The lookups of the cache that was enabled last, the last few hundred of them; any thread."""
    if _latest is None:
        return None
    engine = _latest._engine
    return Run(engine.recorded_run, engine.recorded())
