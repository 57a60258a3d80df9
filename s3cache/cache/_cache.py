"""The cache façade: lookup, save, prefetch, flush."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from s3cache import entries, frame
from s3cache.cache._local import Local, verified
from s3cache.cache._problems import Problems, reason_for
from s3cache.cache._remote import RemoteTier
from s3cache.cache._results import Hit, Miss, NotSaved, Saved
from s3cache.errors import ConfigError, CorruptError, StoreError
from s3cache.frame import Frame, Header
from s3cache.settings import Settings, warn_of_unknown_variables
from s3cache.stats import CacheStats, Counters, Reason, TierName
from s3cache.store import Buffer, Store, open_store
from s3cache.store._url import store_identity
from s3cache.tier import LocalTier
from s3cache.transfer import (
    FlushReport,
    Listener,
    Listeners,
    Prefetch,
    TransferEvent,
    before_exit,
)

__all__ = ["Cache"]

logger = logging.getLogger("s3cache")

_T = TypeVar("_T")


class Cache:
    """Frames under keys, on this machine and in a bucket.

    Any thread may use it. In a forked child it has connections, a background thread and counts
    of the child's own.

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
        self.settings = settings
        self._open_remote = open_remote
        self._namespace = hashlib.sha256(identity.encode()).hexdigest()[:16] + "/"
        self._closed = False
        self._tier = _open_tier(settings)
        self._begin()
        _caches.add(self)

    @classmethod
    def open(cls, url: str | None = None, **options: Any) -> Cache:
        """The cache that ``url``, ``options`` and the environment describe.

        ``options`` are those of :class:`~s3cache.settings.Settings` and of the store. The remote
        is connected to in the background.

        Raises:
            ConfigError: the URL, an option or an environment variable cannot be used.
        """
        settings, rest = Settings.load(url=url, **options)
        warn_of_unknown_variables()
        where = settings.url
        if where is None:
            if rest:
                raise ConfigError(
                    f"option {next(iter(rest))!r}", "is not known", "see s3cache.settings.Settings"
                )
            return cls(settings)
        cache = cls(
            settings,
            open_remote=lambda: open_store(where, **rest),
            identity=store_identity(where, **rest),
        )
        cache.start()
        return cache

    def _begin(self) -> None:
        """Make everything that belongs to one process."""
        self._mutex = threading.Lock()
        self._counters = Counters()
        self._listeners = Listeners()
        self._listeners.add(self._count)
        self._problems = Problems(strict=self.settings.strict)
        self._local = Local(self._tier, self._namespace, self._problems, self._counters)
        self._remote: RemoteTier | None = None
        self._damaged: list[Header] = []  # of corrupt entries in the remote, to be overwritten
        self._forget_exit = before_exit(self._at_exit)

    # -- looking up

    def lookup(self, key: str, accept: Callable[[Frame], bool] | None = None) -> Hit | Miss:
        """The first entry under ``key`` that ``accept`` accepts; any, if it is not given.

        The local tier is asked first, then the remote, for ``lookup_timeout_s`` at most; what
        arrives later still lands in the local tier. Whatever is returned was verified.

        Raises:
            ConfigError: ``key`` is not legal.
            S3CacheError: with ``strict``, whatever would have made it a miss but absence.
        """
        entries.check_key(key)
        started = time.perf_counter()
        search = _Search(self, key)
        if self._closed or self.settings.mode in ("off", "write-only"):
            search.reason = Reason.DISABLED
        elif self.settings.recache:
            search.reason = Reason.FORCED
        else:
            for entry, tier in search.candidates():
                if accept is None or accept(entry):
                    elapsed_s = time.perf_counter() - started
                    self._counters.hit(tier, entry.size, elapsed_s)
                    return Hit(entry, tier, elapsed_s)
        elapsed_s = time.perf_counter() - started
        self._counters.miss(search.reason, elapsed_s)
        return Miss(search.reason, elapsed_s, search.error)

    def prefetch(self, keys: Iterable[str]) -> Prefetch:
        """Fetch the first entry of each key into the local tier, in the background.

        A lookup joins what is in flight. Without a local tier or a remote there is nothing to do,
        and the prefetch is complete at once.

        Raises:
            ConfigError: one of ``keys`` is not legal.
        """
        names = [entries.first_name(entries.check_key(key)) for key in keys]
        remote = None if self.settings.mode == "write-only" else self._remote_now()
        if remote is None or self._local.writable is None:
            return Prefetch([])
        return remote.downloads.prefetch(names)

    # -- saving

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
        if not isinstance(entry, Frame):
            entry = frame.decode(entry)
        entries.check_entry(key, entry)
        started = time.perf_counter()
        error: Exception | None = None
        reason = Reason.DISABLED
        try:
            durable = self._save(entry)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("save", "an entry could not be saved", exc)
            durable, error, reason = None, exc, reason_for(exc)
        elapsed_s = time.perf_counter() - started
        if durable is None:
            self._counters.not_saved(reason, elapsed_s)
            return NotSaved(reason, elapsed_s, error)
        self._counters.saved(entry.size, elapsed_s)
        return Saved(durable, elapsed_s)

    def _save(self, entry: Frame) -> bool | None:
        """Whether it survives this process; ``None`` where there is nowhere to save it to."""
        if self._closed or self.settings.mode in ("off", "read-only"):
            return None
        name = self._namespace + entries.variant_name(entry.header.key, entry.header.variant)
        remote, tier = self._remote_now(), self._local.writable
        if tier is not None:
            try:
                if remote is None:
                    tier.put(name, entry.data)
                else:
                    remote.uploads.put(tier, name, entry.data)
            except StoreError as exc:
                self._local.write_failed(exc)
                if remote is None:
                    raise
            else:
                self._local.wrote(tier, entry.size)
                return True
        if remote is None:
            return None
        remote.uploads.put_in_memory(name, entry.data)
        return False

    # -- the life of a cache

    def start(self) -> None:
        """Connect in the background now, and begin to upload what dead processes have left."""
        remote = self._remote_now()
        if remote is not None:
            remote.connect_soon()

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        """Wait until all that was saved is uploaded, at most ``timeout_s``; says what remains."""
        remote = self._remote
        return FlushReport(0, 0, None) if remote is None else remote.uploads.flush(timeout_s)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` called with each :class:`TransferEvent`, on any thread.

        Returns:
            A function that ends this.
        """
        return self._listeners.add(listener)

    def stats(self) -> CacheStats:
        """Counts so far, exact but for what happens meanwhile."""
        remote = self._remote
        return self._counters.snapshot(
            local=self._local.usage(),
            pending=0 if remote is None else remote.uploads.pending,
            breaker="none" if remote is None else remote.breaker,
            remote={} if remote is None else remote.statistics(),
        )

    def close(self, timeout_s: float | None = None) -> FlushReport:
        """Flush, for ``exit_timeout_s`` unless told otherwise, and let go of everything.

        What then remains is on record for the next process, as far as it was durable. A second
        call does nothing.
        """
        report = FlushReport(0, 0, None)
        if not self._closed:
            report = self.flush(self.settings.exit_timeout_s if timeout_s is None else timeout_s)
            self._let_go()
        return report

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _at_exit(self) -> None:
        remote = self._remote
        if remote is not None:
            report = remote.uploads.flush_while_it_works(self.settings.exit_timeout_s)
            if report.remaining:
                logger.warning(
                    "s3cache: %d uploads to %s are unfinished: %d are on record for the next "
                    "process on this machine, %d are lost",
                    report.remaining,
                    remote.url,
                    report.remaining - report.in_memory,
                    report.in_memory,
                )
        self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        self._forget_exit()
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.close()
        if self._tier is not None:
            self._tier.close()

    # -- the remote

    def _remote_now(self) -> RemoteTier | None:
        """The remote tier, opened by the first in this process who needs it."""
        if self._open_remote is None or self._closed or self.settings.mode == "off":
            return None
        with self._mutex:
            if self._remote is None:
                self._remote = RemoteTier(
                    self._open_remote(),
                    self.settings,
                    tier=self._tier,
                    namespace=self._namespace,
                    arrived=self._arrived,
                    replaces=self._replaces,
                    present=self._local.holds,
                    on_problem=self._upload_failed,
                    listeners=self._listeners,
                )
                if self.settings.mode != "read-only":
                    self._remote.uploads.start()
            return self._remote

    def _arrived(self, name: str, data: Buffer) -> Frame:
        """Verify what was downloaded, and keep it; on a worker thread."""
        try:
            entry = verified(name, data)
        except CorruptError:
            self._counters.set_aside("remote")
            with contextlib.suppress(CorruptError):  # an upload sees a damaged header by itself
                self._damaged.append(frame.decode_header(data))
            raise
        self._local.keep(name, data)
        return entry

    def _replaces(self, there: Header) -> bool:
        return self.settings.recache or there in self._damaged

    def _upload_failed(self, error: Exception) -> None:
        self._counters.upload_failed()
        self._problems.warn("upload", "an upload failed", error)

    def _count(self, event: TransferEvent) -> None:
        if event.step == "done" and event.direction == "upload":
            self._counters.uploaded(event.size)
        elif event.step == "done":
            self._counters.downloaded(event.size)


class _Search:
    """One lookup: its candidates one by one, and afterwards why there were no more."""

    def __init__(self, cache: Cache, key: str) -> None:
        self._cache = cache
        self._key = key
        self._deadline = time.monotonic() + cache.settings.lookup_timeout_s
        self._variants: set[str] = set()  # yielded so far
        self.reason = Reason.ABSENT
        self.error: Exception | None = None

    def candidates(self) -> Iterator[tuple[Frame, TierName]]:
        """Verified entries under the key, each variant once, the cheapest to get first."""
        local = self._cache._local
        first = entries.first_name(self._key)
        # Most entries have one of these two names; a directory is only read for the others.
        tried = [first, entries.variant_name(self._key, "")]
        for name in tried:
            yield from self._try("local", partial(local.load, name))
        for name in self._guard(lambda: local.names(self._key)) or ():
            if name not in tried:
                yield from self._try("local", partial(local.load, name))
        remote = self._guard(self._cache._remote_now)
        if remote is not None:
            yield from self._remote_candidates(remote, first)

    def _remote_candidates(
        self, remote: RemoteTier, first: str
    ) -> Iterator[tuple[Frame, TierName]]:
        def load(name: str) -> Frame | None:
            return remote.downloads.get(name, self._left_s())

        if not self._cache._local.holds(first):
            entry = self._guard(lambda: load(first))
            if entry is None:
                return
            yield from self._offer("remote", entry)
        for name in self._guard(lambda: remote.variants(self._key, self._left_s())) or ():
            # What this machine has under that name has been offered already.
            if name not in map(self._name_of, self._variants):
                yield from self._try("remote", partial(load, name))

    def _name_of(self, variant: str) -> str:
        return entries.variant_name(self._key, variant)

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _try(
        self, tier: TierName, load: Callable[[], Frame | None]
    ) -> Iterator[tuple[Frame, TierName]]:
        entry = self._guard(load)
        if entry is not None:
            yield from self._offer(tier, entry)

    def _offer(self, tier: TierName, entry: Frame) -> Iterator[tuple[Frame, TierName]]:
        if entry.header.variant not in self._variants:
            self._variants.add(entry.header.variant)
            if self.error is None:
                self.reason = Reason.GUARD  # unless the caller takes it
            yield entry, tier

    def _guard(self, call: Callable[[], _T]) -> _T | None:
        """The result of ``call``, or ``None`` and the reason kept if it fails."""
        try:
            return call()
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._cache._problems.met("lookup", "a lookup failed, which is a miss", exc)
            if self.error is None:
                self.error, self.reason = exc, reason_for(exc)
            return None


def _open_tier(settings: Settings) -> LocalTier | None:
    if not settings.local or settings.mode == "off":
        return None
    try:
        return LocalTier(
            settings.local_dir,
            max_bytes=settings.local_max_bytes,
            max_files=settings.local_max_files,
        )
    except StoreError as exc:
        Problems(strict=settings.strict).met("local", "there is no local tier", exc)
        return None


_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
# What a forked child inherits is kept, unused: collecting it would close connections of the parent.
_inherited: list[RemoteTier] = []


def _after_fork_in_child() -> None:
    for cache in list(_caches):
        if cache._remote is not None:
            _inherited.append(cache._remote)
        cache._begin()


os.register_at_fork(after_in_child=_after_fork_in_child)
