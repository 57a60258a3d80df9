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
from dataclasses import replace
from typing import Any

from s3cache import entries, frame
from s3cache.cache._local import Local, verified
from s3cache.cache._problems import Problems, reason_for
from s3cache.cache._remote import RemoteTier
from s3cache.cache._results import Hit, Miss, NotSaved, Saved
from s3cache.cache._search import Search
from s3cache.errors import ConfigError, CorruptError, StoreError
from s3cache.frame import Frame, Header
from s3cache.settings import Settings, warn_of_unknown_variables
from s3cache.stats import CacheStats, Counters, Reason
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
                    f"option {next(iter(rest))}", "means nothing without a URL", "give a URL too"
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
        started = time.perf_counter()
        search = self._search(key, accept)
        if isinstance(search, Reason):
            reason, error = search, None
        else:
            try:
                found = search.run()
            except Exception as exc:  # strict
                self._counters.miss(reason_for(exc), time.perf_counter() - started)
                raise
            if found is not None:
                entry, tier = found
                elapsed_s = time.perf_counter() - started
                self._counters.hit(tier, entry.size, elapsed_s)
                return Hit(entry, tier, elapsed_s)
            reason, error = search.reason, search.error
        elapsed_s = time.perf_counter() - started
        self._counters.miss(reason, elapsed_s)
        return Miss(reason, elapsed_s, error)

    def candidates(self, key: str) -> Iterator[Hit]:
        """The entries under ``key`` one by one, for a caller that judges each by itself.

        As :meth:`lookup` otherwise: the one at which the caller stops is counted as the hit, and
        going on to the end is a miss.

        Raises:
            ConfigError: ``key`` is not legal.
            S3CacheError: with ``strict``, whatever would have made it a miss but absence.
        """
        started = time.perf_counter()
        search = self._search(key, None)
        if isinstance(search, Reason):
            self._counters.miss(search, time.perf_counter() - started)
            return
        elapsed_s = 0.0
        for entry, tier in search.candidates():
            elapsed_s += time.perf_counter() - started
            try:
                yield Hit(entry, tier, elapsed_s)
            except GeneratorExit:
                self._counters.hit(tier, entry.size, elapsed_s)
                raise
            started = time.perf_counter()  # the caller's own time is not the lookup's
            if entry.header in self._damaged:
                search.reason = Reason.CORRUPT  # the caller has rejected it
        self._counters.miss(search.reason, elapsed_s + time.perf_counter() - started)

    def _search(self, key: str, accept: Callable[[Frame], bool] | None) -> Search | Reason:
        """The search for ``key``, or why there is none."""
        entries.check_key(key)
        if self._closed or self.settings.mode in ("off", "write-only"):
            return Reason.DISABLED
        if self.settings.recache:
            return Reason.FORCED
        return Search(
            key,
            accept,
            local=self._local,
            remote=self._remote_now,
            problems=self._problems,
            timeout_s=self.settings.lookup_timeout_s,
        )

    def reject(self, entry: Frame, error: Exception) -> None:
        """Treat an entry that is sound, but turned out to be of no use, as if it were damaged.

        It is set aside here, and what this process saves under its key and variant next replaces
        it in the remote.
        """
        self._problems.warn("entry", "an entry is of no use and is set aside", error)
        self._remember_damaged(entry.header)
        self._local.set_aside(entry)

    def take_back(self, hit: Hit, error: Exception) -> None:
        """:meth:`reject` an entry that was counted as a hit: it is counted as a miss instead."""
        self._counters.taken_back(hit.tier, hit.entry.size, Reason.CORRUPT)
        self.reject(hit.entry, error)

    def count_bypass(self, reasons: Iterable[str]) -> None:
        """Count something that cannot be cached, and why, by short names of the reasons."""
        self._counters.bypassed(reasons)

    def count_time_saved(self, seconds: float) -> None:
        """Count what making a hit took where it was made."""
        self._counters.time_saved(seconds)

    def prefetch(self, keys: Iterable[str]) -> Prefetch:
        """Fetch the first entry of each key into the local tier, in the background.

        A lookup joins what is in flight. Without a local tier or a remote there is nothing to do,
        and the prefetch is complete at once.

        Raises:
            ConfigError: one of ``keys`` is not legal.
        """
        names = [entries.first_name(entries.check_key(key)) for key in keys]
        if self.settings.mode == "write-only" or self._local.writable is None:
            return Prefetch([])
        try:
            remote = self._remote_now()
            return Prefetch([]) if remote is None else remote.downloads.prefetch(names)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("prefetch", "nothing can be prefetched", exc)
            failed = Prefetch(names)
            failed.count(failed=len(failed.names), error=exc)
            return failed

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
        result: Saved | NotSaved
        try:
            result = self._save(entry)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            result = NotSaved(reason_for(exc), 0.0, exc)
            if not self.settings.strict:
                self._problems.warn("save", "an entry could not be saved", exc)
        result = replace(result, elapsed_s=time.perf_counter() - started)
        if isinstance(result, Saved):
            self._counters.saved(entry.size, result.elapsed_s)
            return result
        self._counters.not_saved(result.reason, result.elapsed_s)
        if self.settings.strict and result.error is not None:
            raise result.error
        return result

    def _save(self, entry: Frame) -> Saved | NotSaved:
        if self._closed or self.settings.mode in ("off", "read-only"):
            return NotSaved(Reason.DISABLED, 0.0)
        name = self._namespace + entries.variant_name(entry.header.key, entry.header.variant)
        remote: RemoteTier | None = None
        error: Exception | None = None
        try:
            remote = self._remote_now()
        except Exception as exc:  # noqa: BLE001 - it may be opened later, or by a later process
            error = exc
            self._problems.met("remote", "the remote cannot be opened", exc)
        tier = self._local.writable
        if tier is not None:
            try:
                self._keep(tier, remote, name, entry)
            except (StoreError, ConfigError) as exc:
                self._local.write_failed(exc)
            else:
                self._local.wrote(tier, entry.size)
                return Saved(True, 0.0)
        if remote is not None:
            remote.uploads.put_in_memory(name, entry.data)
            return Saved(False, 0.0)
        error = error or self._local.error
        return NotSaved(Reason.DISABLED if error is None else reason_for(error), 0.0, error)

    def _keep(self, tier: LocalTier, remote: RemoteTier | None, name: str, entry: Frame) -> None:
        if remote is not None:
            remote.uploads.put(tier, name, entry.data)
        elif self._open_remote is not None:
            tier.put_pending(name, entry.data)
        else:
            tier.put(name, entry.data)

    # -- the life of a cache

    def start(self) -> None:
        """Connect in the background now, and begin to upload what dead processes have left.

        Raises:
            ConfigError: the remote cannot be used as it is configured.
            S3CacheError: with ``strict``, the remote cannot be opened.
        """
        try:
            remote = self._remote_now()
        except ConfigError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("remote", "the remote cannot be opened", exc)
            return
        if remote is not None:
            remote.connect_soon()

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        """Wait until all that was saved is uploaded, at most ``timeout_s``; says what remains.

        Raises:
            RuntimeError: called by a listener, on the thread that uploads.
            S3CacheError: with ``strict``, the remote cannot be opened.
        """
        if self.settings.mode in ("off", "read-only"):
            return FlushReport(0, 0, None)
        remote = self._remote
        if remote is None and (recorded := self._recorded()):
            try:
                remote = self._remote_now()
            except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
                self._problems.met("remote", "the remote cannot be opened", exc)
                return FlushReport(recorded, 0, exc)
        return FlushReport(0, 0, None) if remote is None else remote.uploads.flush(timeout_s)

    def _recorded(self) -> int:
        if self._tier is None or self._open_remote is None:
            return 0
        with contextlib.suppress(StoreError):
            return len(self._tier.pending(self._namespace))
        return 0

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
        if self._closed:
            return FlushReport(0, 0, None)
        try:
            return self.flush(self.settings.exit_timeout_s if timeout_s is None else timeout_s)
        finally:
            self._let_go()

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
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            remote, self._remote = self._remote, None
        self._forget_exit()
        if remote is not None:
            remote.close()
        if self._tier is not None:
            self._tier.close()

    # -- the remote

    def _remote_now(self) -> RemoteTier | None:
        """The remote tier, opened by the first in this process who needs it."""
        if self._open_remote is None or self.settings.mode == "off":
            return None
        with self._mutex:
            if self._remote is None and not self._closed:
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

    def _arrived(self, objects: list[tuple[str, Buffer]]) -> list[Frame | Exception]:
        """Verify what was downloaded, and keep it; on a worker thread."""
        found: list[Frame | Exception] = [self._verified(*each) for each in objects]
        sound = [
            each for each, entry in zip(objects, found, strict=True) if isinstance(entry, Frame)
        ]
        try:
            self._local.keep(sound)
        except Exception as exc:  # noqa: BLE001 - strict: whoever asked for them is told
            return [exc if isinstance(entry, Frame) else entry for entry in found]
        return found

    def _verified(self, name: str, data: Buffer) -> Frame | CorruptError:
        try:
            return verified(name, data)
        except CorruptError as exc:
            self._counters.set_aside("remote")
            with contextlib.suppress(CorruptError):  # an upload sees a damaged header by itself
                self._remember_damaged(frame.decode_header(data))
            return exc

    def _remember_damaged(self, header: Header) -> None:
        if header not in self._damaged:
            self._damaged.append(header)

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
        if cache._closed:
            cache._forget_exit()


os.register_at_fork(after_in_child=_after_fork_in_child)
