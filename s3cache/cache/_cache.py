"""The cache: the local tier before the remote one, and where their errors end."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from s3cache import entries, frame
from s3cache.cache._lookup import CandidateLookup, Hit, Miss, NotSaved, Saved
from s3cache.errors import (
    ClosedError,
    ConfigError,
    ReadOnlyError,
    Reason,
    StoreError,
    UntrustedError,
    reason_for,
)
from s3cache.frame import Frame
from s3cache.records import Recorder
from s3cache.settings import Options, Settings, warn_of_unknown_variables
from s3cache.stats import CacheStats, Counters, Level, Listener, Listeners
from s3cache.store import Buffer, Store, open_store, parse_url
from s3cache.tier import (
    Deadline,
    DiskTier,
    FlushReport,
    LocalTier,
    Prefetch,
    RemoteTier,
    before_exit,
)
from s3cache.trust import pack, sign
from s3cache.util.logs import Problems, logger_of
from s3cache.util.threads import call_in_child

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Cache"]

logger = logger_of("storage")

# The upload of an entry that another may replace waits so long: a training step that compiles a
# forward pass comes to its backward within that time, or it never does.
_PROVISIONAL_S = 60.0
# Beside waiting for uploads, closing takes so long at most; of that, writing the last lookups.
_RELEASE_S, _RECORDS_S = 3.0, 0.5

# What a forked child inherits is kept, unused: collecting it would close connections of the parent.
_inherited: list[RemoteTier | None] = []


class Cache:
    """Frames under keys, on this machine and in a bucket.

    Any thread may use it, but listeners may not wait for it. A forked child has connections, a
    background thread, counts and listeners of its own. What goes wrong becomes a reason, a count
    and one warning, or is raised if the settings are strict.

    Args:
        open_remote: makes the remote store, once in each process. ``None`` for no remote.
        identity: a canonical name of the place behind ``open_remote``. The local tier keeps
            entries of different places apart: they need not be equally trusted.

    Raises:
        ConfigError: the local directory was named and is not safe to use; with ``strict``, also
            the default one.
        StoreError: with ``strict``, the local directory cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        open_remote: Callable[[], Store] | None = None,
        identity: str = "",
    ) -> None:
        self._settings = settings
        self._policy, self._signer = settings.trust_policy(), settings.signer()
        self._open_remote = None if settings.mode == "off" else open_remote
        self._closed = False
        self._begin(_open_disk(settings, hashlib.sha256(identity.encode()).hexdigest()[:16]))
        call_in_child(self._begin_in_child)

    @classmethod
    def open(cls, url: str | None = None, **options: Unpack[Options]) -> Self:
        """Open the cache that ``url``, ``options`` and the environment describe.

        ``options`` are those of :class:`~s3cache.settings.Settings` and of the store.

        Raises:
            ConfigError: the URL, an option or an environment variable cannot be used.
        """
        settings, store_options = Settings.load(url, **options)
        warn_of_unknown_variables()
        where = settings.url
        if where is None:
            for name in store_options:
                raise ConfigError(f"option {name}", "means nothing without a URL", "give one too")
            return cls(settings)
        location = parse_url(where, **store_options)
        cache = cls(
            settings,
            open_remote=lambda: open_store(where, **store_options),
            identity=location.identity,
        )
        cache.start()
        return cache

    def _begin(self, disk: DiskTier | None) -> None:
        """Make everything that belongs to one process."""
        self._mutex = threading.Lock()
        self._counters_of: dict[Level, Counters] = {each: Counters() for each in get_args(Level)}
        self._counters = self._counters_of["aot"]
        self._provisional: set[str] = set()  # names saved here that may yet be superseded
        self._unsent: set[str] = set()  # names made pending here when no remote could be opened
        self._last_report = FlushReport(0, 0, None)
        self._listeners = Listeners()
        self._listeners.add(self._counters.transferred)
        self._problems = Problems(strict=self.settings.strict)
        trust = None if self._policy.level == "off" else self._policy.check
        self._local = LocalTier(disk, self._counters, self._problems, trust)
        self._records = Recorder(None if disk is None or not self.settings.record else disk.root)
        if self.settings.record:
            self._listeners.add(self._records.transferred)
        self._replaceable = entries.Replaceable(everything=self.settings.recache)
        self._remote: RemoteTier | None = None
        self._closed_remote: RemoteTier | None = None  # its counts stay readable
        self._forget_exit = before_exit(self._at_exit)

    def _begin_in_child(self) -> None:
        _inherited.append(self._remote or self._closed_remote)
        self._begin(self._local.disk)
        if self._closed:
            self._forget_exit()

    @property
    def settings(self) -> Settings:
        """The settings it was opened with."""
        return self._settings

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking up

    def lookup(self, key: str, accept: Callable[[Frame], bool] | None = None) -> Hit | Miss:
        """Return the first entry under ``key`` that ``accept`` accepts; any, if it is not given.

        The local tier is asked first, then the remote, for ``lookup_timeout_s`` at most; what
        arrives later still lands in the local tier. Whatever is returned was verified.

        Raises:
            ConfigError: ``key`` is not legal.
            S3CacheError: with ``strict``, whatever would have made it a miss but absence.
        """
        with self._candidates(key) as lookup:
            for hit in lookup:
                try:
                    accepted = accept is None or accept(hit.entry)
                except Exception as exc:  # noqa: BLE001 - no reason to end the caller's program
                    lookup.fail(exc)
                    continue
                if accepted:
                    lookup.accept(hit)
                    break
        return lookup.close()

    def _candidates(
        self,
        key: str,
        level: Level = "aot",
        *,
        local: bool = True,
        remote: bool = True,
        counters: Counters | None = None,
    ) -> CandidateLookup:
        """Look up the entries under ``key`` for the caller to choose one; count for ``level``."""
        skip = Reason.FORCED if self.settings.recache else None
        if self._closed or self.settings.mode in ("off", "write-only"):
            skip = Reason.DISABLED
        return CandidateLookup(
            entries.check_key(key),
            skip,
            self._local if local else None,
            self._remote_now if remote else lambda: None,
            self._set_aside,
            counters or self._counters_of[level],
            self._problems,
            self.settings.lookup_timeout_s,
        )

    def _set_aside(self, entry: Frame, error: Exception) -> None:
        """Treat a sound entry that cannot be used as damaged: the next save replaces it."""
        self._problems.warn("entry", "an entry cannot be used and is set aside", error)
        self._replaceable.add(entry.digest)
        self._local.set_aside(entry)

    def prefetch(self, keys: Iterable[str]) -> Prefetch:
        """Fetch the first entry of each key into the local tier, in the background.

        A lookup joins what is in flight. Without a local tier or a remote there is nothing to do.

        Raise ConfigError if one of ``keys`` is not legal.
        """
        names = [entries.first_name(entries.check_key(key)) for key in keys]
        if self.settings.mode == "write-only" or not self._local.is_writable:
            return Prefetch([])
        try:
            remote = self._remote_now()
            return Prefetch([]) if remote is None else remote.prefetch(names)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("prefetch", "nothing can be prefetched", exc)
            failed = Prefetch(names)
            failed.count(failed=len(failed.names), error=exc)
            return failed

    # -- saving

    def save(self, key: str, entry: Frame | Buffer) -> Saved | NotSaved:
        """Keep ``entry`` and share it, without waiting for the network.

        On return it is on the local disk, pending. Entries of different variants live side by side.
        One of the same variant replaces the local one; the remote one stays, unless ``recache`` is
        set or it is known to be damaged.

        Raises:
            ConfigError: ``key`` is not legal, or not the one in the frame.
            CorruptError: ``entry`` is no well-formed frame.
            S3CacheError: with ``strict``, whatever else keeps it from being saved.
        """
        return self._save(key, entry)

    def _save(
        self,
        key: str,
        entry: Frame | Buffer,
        *,
        level: Level = "aot",
        provisional: bool = False,
        remote: bool = True,
    ) -> Saved | NotSaved:
        """Save as :meth:`save` does; without ``remote``, on this machine only.

        If ``provisional``, upload it in a minute, or with the next flush or at the exit, so that
        :meth:`Engine.supersede` may remove it before.
        """
        started = time.perf_counter()
        counters, size = self._counters_of[level], 0
        result: Saved | NotSaved
        try:
            found = entry if isinstance(entry, Frame) else frame.decode(entry)
            entries.check_entry(key, found)
            size = found.size
            result = self._write(found, provisional=provisional, share=remote)
        except Exception as exc:
            if not size and not isinstance(exc, MemoryError):
                raise  # the entry is wrong, or does not belong to the key
            if not self.settings.strict:
                self._problems.warn("save", "an entry could not be saved", exc)
            result = NotSaved(reason_for(exc), 0.0, exc)
        result = replace(result, elapsed_s=time.perf_counter() - started)
        if isinstance(result, Saved):
            counters.saved(size, result.elapsed_s)
            return result
        counters.not_saved(result.reason, result.elapsed_s)
        if self.settings.strict and result.error is not None:
            raise result.error
        return result

    def _write(self, entry: Frame, *, provisional: bool, share: bool) -> Saved | NotSaved:
        if self._closed or self.settings.mode in ("off", "read-only"):
            return NotSaved(Reason.DISABLED, 0.0)
        # Here and nowhere later: what other processes have left to upload is theirs to sign.
        data = self._signed(entry).data
        name = entries.variant_name(entry.header.key, entry.header.variant)
        # If it cannot be opened now, it may be later, or by a later process.
        remote, error = self._try_remote() if share else (None, None)
        if provisional:
            self._provisional.add(name)

        def write(disk: DiskTier) -> None:
            if remote is not None and provisional:
                remote.uploads.put_delayed(name, data, _PROVISIONAL_S)
            elif remote is not None:
                remote.uploads.put(name, data)
            elif share and self._open_remote is not None:
                disk.put_pending(name, data)
                self._unsent.add(name)
            else:
                disk.put(name, data)

        if self._local.write(write):
            return Saved(True, 0.0)
        if remote is None:
            error = error or self._local.error
            return NotSaved(Reason.DISABLED if error is None else reason_for(error), 0.0, error)
        if provisional and self._local.disk is None:
            remote.uploads.put_delayed(name, data, _PROVISIONAL_S)
        else:
            remote.uploads.put_in_memory(name, data)
        return Saved(False, 0.0)

    def _signed(self, entry: Frame) -> Frame:
        """Return ``entry`` with our signature, if we have a key; unsigned if that fails."""
        if self._signer is None:
            return entry
        times = {"issued_s": int(time.time()), "ttl_s": int(self.settings.signature_ttl_s)}
        try:
            signature = sign(entry.digest, self._signer, audience=self.settings.audience, **times)
        except UntrustedError as exc:
            if self._policy.level == "require":  # we would not use the entry ourselves
                raise
            self._problems.warn("signing", "an entry is saved unsigned", exc)
            return entry
        return frame.decode(frame.signed(entry, lambda _: pack([signature])))

    # -- removing

    def remove(self, key: str) -> int:
        """Remove all entries under ``key``, here and in the remote; return how many there were.

        What is pending is uploaded first, so that nothing comes back. Other machines keep theirs.

        Raises:
            ConfigError: ``key`` is not legal.
            StoreError: a tier refuses, or cannot do it; what was removed by then stays so.
        """
        return self._remove_all(entries.name_prefix(entries.check_key(key)))

    def clear(self) -> int:
        """Remove all entries of this cache, as :meth:`remove` does those of one key."""
        return self._remove_all(entries.NAMES)

    def _remove_all(self, prefix: str) -> int:
        if self._closed:
            raise ClosedError("the cache was closed")
        if self.settings.mode in ("off", "read-only"):
            raise ReadOnlyError(f"the mode is {self.settings.mode}", op="remove")
        self.flush(self.settings.exit_timeout_s)
        remote, disk = self._remote_now(), self._local.disk
        names = set() if remote is None else {*remote.remove(prefix)}
        if disk is not None:
            here = [info.key for info in disk.objects(prefix)]
            for name in here:
                disk.delete(name)
            names.update(here)
        return len(names)

    # -- counting

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with each transfer, on any thread; return what ends this."""
        return self._listeners.add(listener)

    def stats(self) -> CacheStats:
        """Return the counts so far; those of a closed cache stay."""
        usage = self._local.read(DiskTier.usage, None)
        more: dict[str, object] = {"local": usage, "fx": self._counters_of["fx"].level()}
        if (remote := self._remote or self._closed_remote) is not None:
            more |= {"pending": remote.uploads.pending, "breaker": remote.breaker}
            more["remote"] = remote.statistics()
        return self._counters.snapshot(**more)

    # -- the life of a cache

    def start(self) -> None:
        """Connect in the background now, and begin to upload what other processes have left.

        Raises:
            ConfigError: the remote cannot be used as it is configured.
            S3CacheError: with ``strict``, the remote cannot be opened.
        """
        try:
            if (remote := self._remote_now()) is not None:
                remote.connect_soon()
        except ConfigError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("remote", "the remote cannot be opened", exc)

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        """Wait until all that was saved is uploaded, at most ``timeout_s``; return what remains.

        With ``strict``, raise S3CacheError where the remote cannot be opened.
        """
        if self.settings.mode in ("off", "read-only"):
            return FlushReport(0, 0, None)
        if self._closed:
            return self._last_report
        remote, error = self._remote, None
        if remote is None and self._unsent:
            remote, error = self._try_remote()
        if remote is None:
            return FlushReport(len(self._unsent), 0, error)
        return remote.uploads.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> FlushReport:
        """Flush, by default for ``exit_timeout_s``, and leave the rest to the next process."""
        if not self._closed:
            limit_s = self._exit_timeout_s() if timeout_s is None else timeout_s
            deadline = Deadline(limit_s + _RELEASE_S)
            try:
                self._last_report = self.flush(limit_s)
            finally:
                self._release(deadline)
        return self._last_report

    def _exit_timeout_s(self) -> float:
        limit_s = self.settings.exit_timeout_s
        return limit_s if self._remote is None else self._remote.exit_wait_s(limit_s)

    def _at_exit(self) -> None:
        limit_s = self._exit_timeout_s()
        deadline = Deadline(limit_s + _RELEASE_S)
        if self._remote is not None:
            self._last_report = report = self._remote.uploads.flush_while_it_works(limit_s)
            if report.remaining:
                counts = report.remaining, report.remaining - report.in_memory, report.in_memory
                logger.warning(
                    "uploads to %s that are unfinished: %d; on record for the next process on "
                    "this machine: %d; lost: %d",
                    self._remote.url,
                    *counts,
                )
        self._release(deadline)

    def _release(self, deadline: Deadline) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            remote, self._remote = self._remote, None
            self._closed_remote = remote
        self._forget_exit()
        self._records.close(min(deadline.left_s, _RECORDS_S))
        if remote is not None:
            remote.close(deadline.left_s)
        if self._local.disk is not None:
            self._local.disk.close(deadline.left_s)

    def _remote_now(self) -> RemoteTier | None:
        """Return the remote tier; the first call in this process opens it."""
        if self._open_remote is None:
            return None
        with self._mutex:
            if self._remote is None and not self._closed:
                self._remote = RemoteTier(
                    self._open_remote(),
                    self.settings,
                    disk=self._local,
                    replaceable=self._replaceable,
                    counters=self._counters,
                    listeners=self._listeners,
                    problems=self._problems,
                )
                if self.settings.mode != "read-only":
                    self._remote.uploads.start(self._unsent)
            return self._remote

    def _try_remote(self) -> tuple[RemoteTier | None, Exception | None]:
        """Return the remote tier, or why it cannot be opened."""
        try:
            return self._remote_now(), None
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("remote", "the remote cannot be opened", exc)
            return None, exc


def _open_disk(settings: Settings, namespace: str) -> DiskTier | None:
    """Return the local tier, if there is to be one and one of its places can be used."""
    problems, problem = Problems(strict=False), None
    for place in settings.local_dirs if settings.local and settings.mode != "off" else ():
        try:
            disk = DiskTier(
                place,
                namespace=namespace,
                max_bytes=settings.local_max_bytes,
                max_files=settings.local_max_files,
            )
        except (ConfigError, StoreError) as exc:
            # The program did not name the default, and is not to blame if another user has it.
            named = not settings.has_default_local_dir
            if settings.strict or (named and isinstance(exc, ConfigError)):
                raise
            problem = problem or exc
        else:
            if problem is not None:
                problems.warn("local", f"the local tier goes to {place}", problem)
            return disk
    if problem is not None:
        problems.warn("local", "there is no local tier", problem)
    return None
