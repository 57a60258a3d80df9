"""The cache: the local tier before the remote one, and where their errors end."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from s3cache import entries, frame
from s3cache._problems import Problems, reason_for
from s3cache.cache._lookup import Hit, JudgedLookup, Miss, NotSaved, Saved
from s3cache.cache._opening import open_disk, sign_entry, trust_of
from s3cache.errors import ClosedError, ConfigError, ReadOnlyError, StoreError, UntrustedError
from s3cache.frame import Frame
from s3cache.records import Event, Record, Recorder, Transfers
from s3cache.settings import Options, Settings, warn_of_unknown_variables
from s3cache.stats import CacheStats, Counters, Level, Listener, Listeners, Reason
from s3cache.store import (
    Buffer,
    Store,
    open_store,
    store_identity,
    store_note,
)
from s3cache.tier import (
    Deadline,
    DiskTier,
    FlushReport,
    LocalTier,
    Prefetch,
    RemoteTier,
    before_exit,
)
from s3cache.util.forks import call_in_child
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Cache", "Engine"]

logger = logger_of("storage")

# How long the upload of an entry that another may replace is delayed: a training step that compiles
# a forward pass comes to its backward within that time, or it never does.
_PROVISIONAL_S = 60.0
# Beside waiting for uploads, closing takes so long at most; of that, writing the last lookups.
_RELEASE_S = 3.0
_RECORDS_S = 0.5

# What a forked child inherits is kept, unused: collecting it would close connections of the parent.
_inherited: list[RemoteTier | None] = []


class Cache:
    """Frames under keys, on this machine and in a bucket.

    Any thread may use it, but listeners may not wait for it. In a forked child it has
    connections, a background thread, counts and listeners of the child's own.

    What goes wrong becomes a reason, a count and one warning. If the settings are strict, it is
    raised instead.

    Args:
        open_remote: makes the remote store, once in each process. ``None`` for no remote.
        identity: a canonical name of the place behind ``open_remote``. The local tier keeps
            entries of different places apart: they need not be equally trusted.
        note: how ``open_remote``'s store writes objects, for other processes that upload what was
            saved here; see :attr:`s3cache.store.S3Options.note`.

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
        note: bytes = b"",
    ) -> None:
        self._settings = settings
        self._policy, self._signer = trust_of(settings)
        self._check_trust = self._policy.check if self._policy.is_on else None
        self._open_remote = open_remote
        self._closed = False
        namespace = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._begin(open_disk(settings, namespace, note))
        call_in_child(self._begin_in_child)

    @classmethod
    def open(cls, url: str | None = None, **options: Unpack[Options]) -> Cache:
        """Open the cache that ``url``, ``options`` and the environment describe.

        ``options`` are those of :class:`~s3cache.settings.Settings` and of the store. The remote
        is connected to in the background.

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
        cache = cls(
            settings,
            open_remote=lambda: open_store(where, **store_options),
            identity=store_identity(where, **store_options),
            note=store_note(where, **store_options),
        )
        cache.start()
        return cache

    def _begin(self, disk: DiskTier | None) -> None:
        """Make everything that belongs to one process."""
        self._mutex = threading.Lock()
        self._counters = Counters()
        self._other_counters: dict[Level, Counters] = {"fx": Counters(), "shapes": Counters()}
        self._provisional: set[str] = set()  # names saved here that may yet be superseded
        self._unsent: set[str] = set()  # names made pending here when no remote could be opened
        self._last_report = FlushReport(0, 0, None)
        self._listeners = Listeners()
        self._listeners.add(self._counters.transferred)
        self._problems = Problems(strict=self.settings.strict)
        self._local = LocalTier(disk, self._counters, self._problems, self._check_trust)
        self._records = Recorder(None if disk is None or not self.settings.record else disk.root)
        if self.settings.record:
            self._listeners.add(Transfers(self._records.add).note)
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
        try:
            judged = self._judged(key, self._counters)
        except MemoryError as exc:
            return Miss(Reason.MACHINE, 0.0, exc)
        with judged as lookup:
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

    def _judged(
        self, key: str, counters: Counters, *, local: bool = True, remote: bool = True
    ) -> JudgedLookup:
        skip: Reason | None = None
        if self._closed or self.settings.mode in ("off", "write-only"):
            skip = Reason.DISABLED
        elif self.settings.recache:
            skip = Reason.FORCED
        return JudgedLookup(
            entries.check_key(key),
            skip=skip,
            disk=self._local if local else None,
            remote=self._remote_now if remote else lambda: None,
            set_aside=self._reject,
            counters=counters,
            problems=self._problems,
            timeout_s=self.settings.lookup_timeout_s,
        )

    def _reject(self, entry: Frame, error: Exception) -> None:
        """Treat a sound entry that cannot be used as damaged.

        It is set aside here, and what is saved next under its key and variant replaces it in the
        remote.
        """
        self._problems.warn("entry", "an entry cannot be used and is set aside", error)
        self._replaceable.add(entry.digest)
        self._local.set_aside(entry)

    def prefetch(self, keys: Iterable[str]) -> Prefetch:
        """Fetch the first entry of each key into the local tier, in the background.

        A lookup joins what is in flight. Without a local tier or a remote there is nothing to do,
        and the prefetch is complete at once.

        Raises:
            ConfigError: one of ``keys`` is not legal.
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

        On return it is on the local disk, pending. Entries with one key and different variants live
        side by side. One with the same variant replaces the local one; the remote one stays,
        unless ``recache`` is set or it is known to be damaged.

        Raises:
            ConfigError: ``key`` is not legal, or not the one in the frame.
            CorruptError: ``entry`` is no well-formed frame.
            S3CacheError: with ``strict``, whatever else keeps it from being saved.
        """
        return self._save_counted(key, entry, self._counters)

    def _save_counted(
        self,
        key: str,
        entry: Frame | Buffer,
        counters: Counters,
        *,
        provisional: bool = False,
        share: bool = True,
    ) -> Saved | NotSaved:
        started = time.perf_counter()
        size = 0
        result: Saved | NotSaved
        try:
            checked = _checked(key, entry)
            size = checked.size
            result = self._save(checked, provisional=provisional, share=share)
        except MemoryError as exc:
            result = self._not_saved(exc)
        except Exception as exc:
            if not size:  # the entry itself is wrong, which is its maker's mistake
                raise
            result = self._not_saved(exc)
        result = replace(result, elapsed_s=time.perf_counter() - started)
        if isinstance(result, Saved):
            counters.saved(size, result.elapsed_s)
            return result
        counters.not_saved(result.reason, result.elapsed_s)
        if self.settings.strict and result.error is not None:
            raise result.error
        return result

    def _not_saved(self, error: Exception) -> NotSaved:
        if not self.settings.strict:
            self._problems.warn("save", "an entry could not be saved", error)
        return NotSaved(reason_for(error), 0.0, error)

    def _save(self, entry: Frame, *, provisional: bool, share: bool) -> Saved | NotSaved:
        if self._closed or self.settings.mode in ("off", "read-only"):
            return NotSaved(Reason.DISABLED, 0.0)
        # Here and nowhere later: what other processes have left to upload is theirs to sign.
        if self._signer is not None:
            try:
                entry = sign_entry(entry, self._signer, self.settings)
            except UntrustedError as exc:
                if self._policy.level == "require":  # we would not use the entry ourselves
                    raise
                self._problems.warn("signing", "an entry is saved unsigned", exc)
        name = entries.variant_name(entry.header.key, entry.header.variant)
        remote: RemoteTier | None = None
        error: Exception | None = None
        try:
            remote = self._remote_now() if share else None
        except Exception as exc:  # noqa: BLE001 - it may be opened later, or by a later process
            error = exc
            self._problems.met("remote", "the remote cannot be opened", exc)
        if provisional:
            self._provisional.add(name)

        def write(disk: DiskTier) -> None:
            if remote is not None and provisional:
                remote.uploads.put_delayed(name, entry.data, _PROVISIONAL_S)
            elif remote is not None:
                remote.uploads.put(name, entry.data)
            elif share and self._open_remote is not None:
                disk.put_pending(name, entry.data)
                self._unsent.add(name)
            else:
                disk.put(name, entry.data)

        if self._local.write(write):
            return Saved(True, 0.0)
        if remote is None:
            error = error or self._local.error
            return NotSaved(Reason.DISABLED if error is None else reason_for(error), 0.0, error)
        if provisional and self._local.disk is None:
            remote.uploads.put_delayed(name, entry.data, _PROVISIONAL_S)
        else:
            remote.uploads.put_in_memory(name, entry.data)
        return Saved(False, 0.0)

    # -- removing

    def remove(self, key: str) -> int:
        """Remove all entries under ``key``, here and in the remote; return how many there were.

        What is pending is uploaded first, so that nothing comes back later. Other machines keep
        what they have. Removing takes the right to delete in the remote.

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
        remote = self._remote_now()
        names = set() if remote is None else {*remote.remove(prefix)}
        return len(names.union(self._local.remove_all(prefix)))

    # -- counting

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` called with each :class:`TransferEvent`, on any thread.

        Returns:
            A function that ends this.
        """
        return self._listeners.add(listener)

    def stats(self) -> CacheStats:
        """Return the counts so far; those of a closed cache stay."""
        remote = self._remote or self._closed_remote
        return self._counters.snapshot(
            local=self._local.usage(),
            pending=0 if remote is None else remote.uploads.pending,
            breaker="none" if remote is None else remote.breaker,
            remote={} if remote is None else remote.statistics(),
            fx=self._other_counters["fx"].level(),
        )

    # -- the life of a cache

    def start(self) -> None:
        """Connect in the background now, and begin to upload what other processes have left.

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
        """Wait until all that was saved is uploaded, at most ``timeout_s``; return what remains.

        Raises:
            RuntimeError: called by a listener, on the thread that uploads.
            S3CacheError: with ``strict``, the remote cannot be opened.
        """
        if self.settings.mode in ("off", "read-only"):
            return FlushReport(0, 0, None)
        if self._closed:
            return self._last_report
        remote = self._remote
        if remote is not None:
            return remote.uploads.flush(timeout_s)
        pending = self._pending_on_disk()
        if not pending.remaining:
            return pending
        try:
            remote = self._remote_now()
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("remote", "the remote cannot be opened", exc)
            return replace(pending, error=exc)
        return pending if remote is None else remote.uploads.flush(timeout_s)

    def _pending_on_disk(self) -> FlushReport:
        disk = self._local.disk
        if disk is None or self._open_remote is None:
            return FlushReport(0, 0, None)
        try:
            return FlushReport(len(disk.pending()), 0, None)
        except StoreError as exc:  # what we have put there ourselves is there, as far as we know
            return FlushReport(len(self._unsent), 0, exc)

    def close(self, timeout_s: float | None = None) -> FlushReport:
        """Flush, by default for ``exit_timeout_s``, and release everything.

        What then remains is left to the next process, as far as it was durable. A second call does
        nothing.
        """
        if self._closed:
            return self._last_report
        limit_s = self._exit_timeout_s() if timeout_s is None else timeout_s
        deadline = Deadline(limit_s + _RELEASE_S)
        try:
            self._last_report = self.flush(limit_s)
            return self._last_report
        finally:
            self._release(deadline)

    def _exit_timeout_s(self) -> float:
        limit_s = self.settings.exit_timeout_s
        return limit_s if self._remote is None else self._remote.exit_wait_s(limit_s)

    def _at_exit(self) -> None:
        remote = self._remote
        limit_s = self._exit_timeout_s()
        deadline = Deadline(limit_s + _RELEASE_S)
        if remote is not None:
            report = remote.uploads.flush_while_it_works(limit_s)
            self._last_report = report
            if report.remaining:
                logger.warning(
                    "uploads to %s that are unfinished: %d; on record for the next process on "
                    "this machine: %d; lost: %d",
                    remote.url,
                    report.remaining,
                    report.remaining - report.in_memory,
                    report.in_memory,
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
        self._local.close(deadline.left_s)

    def _remote_now(self) -> RemoteTier | None:
        """Return the remote tier; the first call in this process opens it."""
        if self._open_remote is None or self.settings.mode == "off":
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
                    check_trust=self._check_trust,
                )
                if self.settings.mode != "read-only":
                    self._remote.uploads.backlog.expect(self._unsent)
                    self._remote.uploads.start()
            return self._remote


class Engine(Cache):
    """A :class:`Cache` of several levels: candidates, provisional saves, counts and records."""

    @classmethod
    def open(cls, url: str | None = None, **options: Unpack[Options]) -> Engine:
        """See :meth:`Cache.open`."""
        engine = super().open(url, **options)
        assert isinstance(engine, cls)
        return engine

    @property
    def uses_trusted_only(self) -> bool:
        """Whether only entries that a trusted key has signed are used."""
        return self._policy.level == "require"

    @property
    def policy_digest(self) -> str:
        """A digest of the list of trusted keys."""
        return self._policy.digest

    @property
    def has_remote(self) -> bool:
        """Whether there is a remote at all; it may not answer."""
        return self._open_remote is not None and self.settings.mode != "off"

    def judged(
        self, key: str, level: Level = "aot", *, local: bool = True, remote: bool = True
    ) -> JudgedLookup:
        """Look up the entries under ``key``, for the caller to choose one; counted for ``level``.

        Args:
            local, remote: whether that tier is asked.

        Raises:
            ConfigError: ``key`` is not legal.
        """
        return self._judged(key, self._counters_of(level), local=local, remote=remote)

    def inquire(self, key: str) -> str:
        """Say where an entry under ``key`` is, or why none is used, without counting the lookup.

        Whether it fits is not asked.
        """
        counters = Counters()
        with self._judged(key, counters) as lookup:
            hit = next(iter(lookup), None)
            if hit is not None:
                return hit.tier
        missed = lookup.close()
        causes = ", ".join(f"{count} {cause}" for cause, count in counters.level().refused.items())
        reason = str(missed.reason) if isinstance(missed, Miss) else missed.tier
        return f"{reason} ({causes})" if causes else reason

    def save(
        self,
        key: str,
        entry: Frame | Buffer,
        *,
        level: Level = "aot",
        provisional: bool = False,
        remote: bool = True,
    ) -> Saved | NotSaved:
        """Save as :meth:`Cache.save` does.

        Args:
            level: which one it is counted for.
            provisional: upload it in a minute, or with the next flush or at the exit, so that
                :meth:`supersede` may remove it before.
            remote: upload it; else it stays on this machine.
        """
        return self._save_counted(
            key, entry, self._counters_of(level), provisional=provisional, share=remote
        )

    def supersede(self, key: str, variant: str) -> None:
        """Remove what was saved provisionally, as a better entry has taken its place.

        An upload that is under way goes on.
        """
        name = entries.variant_name(key, variant)
        if name not in self._provisional:
            return
        self._provisional.discard(name)
        try:
            if self._remote is not None:
                is_removed = self._remote.uploads.cancel_delayed(name)
            else:
                is_removed = self._local.remove(name)
        except Exception as exc:  # noqa: BLE001 - then it is uploaded, which does no harm
            self._problems.met("local", "an entry that is not needed cannot be removed", exc)
        else:
            if is_removed:
                self._counters_of("fx").superseded()

    def count_bypass(self, reasons: Iterable[str], level: Level = "aot") -> None:
        """Count something that cannot be cached, and why, by short names of the reasons."""
        self._counters_of(level).bypassed(reasons)

    def count_time_saved(self, seconds: float) -> None:
        """Count what making a hit took where it was made."""
        self._counters.time_saved(seconds)

    def record(self, what: Record | Event) -> None:
        """Record the outcome of a lookup, in the background."""
        if self.settings.record:
            self._records.add(what)

    def note(self, **values: object) -> None:
        """Record how far the program is, for a process that watches it."""
        if self.settings.record:
            self._records.note(**values)

    @property
    def recorded_run(self) -> str:
        """The name of the run that lookups are recorded under."""
        return self._records.run

    def recorded(self) -> tuple[Record, ...]:
        """The last lookups of this process, the oldest first."""
        return self._records.held()

    def _counters_of(self, level: Level) -> Counters:
        return self._other_counters.get(level, self._counters)


def _checked(key: str, entry: Frame | Buffer) -> Frame:
    checked = entry if isinstance(entry, Frame) else frame.decode(entry)
    entries.check_entry(key, checked)
    return checked
