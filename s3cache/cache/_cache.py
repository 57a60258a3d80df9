"""The cache: the local tier before the remote tier, and the end of their errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from s3cache import entries, frame
from s3cache.cache._events import CacheEvents
from s3cache.cache._lookup import (
    CandidateLookup,
    Hit,
    Miss,
    NotSaved,
    Retry,
    Saved,
)
from s3cache.errors import (
    ClosedError,
    ConfigError,
    ReadOnlyError,
    Reason,
    StoreError,
    TooLargeError,
    UntrustedError,
    reason_for,
)
from s3cache.frame import Frame
from s3cache.records import Event, Record, Recorder, Run
from s3cache.seam import Feature, features, hints, kinds
from s3cache.settings import Settings, warn_of_unknown_variables
from s3cache.stats import (
    CacheStats,
    Counters,
    EntryKind,
    FeatureCounters,
    LevelStats,
    Listener,
    Listeners,
    TransferEvent,
)
from s3cache.store import Buffer, Store, open_store, parse_url
from s3cache.tier import (
    DiskTier,
    FlushReport,
    LocalTier,
    Prefetch,
    RemoteTier,
    Uploads,
    before_exit,
    open_disk,
)
from s3cache.trust import Policy, pack, sign
from s3cache.util.logs import Problems, logger_of
from s3cache.util.threads import call_in_child

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from s3cache.options import Options

logger = logger_of("storage")

# How long the upload of an entry waits that another may replace: a training step that compiles a
# forward usually reaches its backward within this time, if at all.
_DELAY_S = 60.0
# How long deleting an entry from the remote may take.
_DISCARD_S = 10.0
# Limits on closing, besides the wait for uploads: in all, and for writing the last records.
_RELEASE_S, _RECORDS_S, _MOMENT_S = 3.0, 0.5, 0.1

# A forked child keeps inherited tiers unused: collecting them would close the parent's connections.
_inherited: list[tuple[object, ...]] = []


class Engine:
    """The tiers of a :class:`Cache`, with what torch's hooks and features need beyond it.

    These are kinds of entries, candidates of a lookup, events, and records.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        open_remote: Callable[[], Store] | None = None,
        identity: str = "",
        used: Sequence[Feature] = (),
    ) -> None:
        self.settings, self._used = settings, used
        self._policy, self._signer = settings.trust_policy(), settings.signer()
        self._open_remote = None if settings.mode == "off" else open_remote
        self._closed = False
        self._begin(open_disk(settings, identity))
        call_in_child(self._begin_in_child)

    def _begin(self, disk: DiskTier | None) -> None:
        """Create the state that belongs to one process."""
        self._mutex = threading.Lock()
        self.events = CacheEvents(strict=self.settings.strict)
        self.counts = {each.name: FeatureCounters(each) for each in features()}
        self._counters_of: dict[EntryKind, Counters] = {
            kind: Counters() for kind in ("aot", "fx", *kinds())
        }
        self._counters = self._counters_of["aot"]
        self._unsent: set[str] = set()  # names that are pending because no remote could be opened
        self._last_report = FlushReport(0, 0, None)
        self._listeners = Listeners()
        self._listeners.add(self._count_transfer)
        self._problems = Problems(strict=self.settings.strict)
        self._replaceable = entries.Replaceable(everything=self.settings.recache)
        trust = None if self._policy.level == "off" else self._policy.check
        self._local = LocalTier(disk, self._counters, self._problems, self._replaceable, trust)
        self._records = Recorder(None if disk is None or not self.settings.record else disk.root)
        if self.settings.record:
            self._listeners.add(self._records.transferred)
        self._remote: RemoteTier | None = None
        self._uploads: Uploads | None = None
        self._forget_exit = before_exit(self._at_exit)
        #: What features keep for this process, by their names.
        self.parts: dict[str, Any] = {}
        for feature in self._used:
            if feature.is_used(self.settings):
                strict = self.settings.strict
                self.parts[feature.name] = feature.call(feature.begins, self, strict=strict)

    def _begin_in_child(self) -> None:
        _inherited.append((self._remote, self._uploads))
        self._begin(self._local.disk)
        if self._closed:
            self._forget_exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking up

    def lookup(self, key: str, accept: Callable[[Frame], bool] | None = None) -> Hit | Miss:
        with self.candidates(key) as lookup:
            for hit in lookup:
                try:
                    if accept is None or accept(hit.entry):
                        lookup.accept(hit)
                        break
                except Exception as exc:  # noqa: BLE001 - no reason to end the caller's program
                    lookup.fail(exc)
        return lookup.close()

    def candidates(
        self,
        key: str,
        level: EntryKind = "aot",
        *,
        local: bool = True,
        remote: bool = True,
        counters: Counters | None = None,
        retry: Callable[[], Retry | None] | None = None,
        replaced: bool = False,
    ) -> CandidateLookup:
        """Look up the entries under ``key``, so that the caller can choose one; count at ``level``.

        If the caller chooses none, ``retry`` is called, which may wait for another process. With
        ``recache``, no entry may be accepted, and only with ``replaced`` the lookup goes through
        them.
        """
        skip = Reason.FORCED if self.settings.recache else None
        if self._closed or self.settings.mode in ("off", "write-only"):
            skip = Reason.DISABLED
        return CandidateLookup(
            entries.check_key(key),
            skip,
            self._local,
            local,
            self._remote_now if remote else lambda: None,
            counters or self._counters_of[level],
            self._problems,
            self.settings.lookup_timeout_s,
            self.events.used.tell,
            None if skip else retry,
            replaced and skip is Reason.FORCED,
        )

    def prefetch(self, keys: Iterable[str]) -> Prefetch:
        names = [entries.first_name(entries.check_key(key)) for key in keys]
        if self.settings.mode == "write-only" or not self._local.is_writable:
            return Prefetch([])
        try:
            remote = self._remote_now()
            return Prefetch([]) if remote is None else remote.prefetch(names)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("prefetch", "nothing can be prefetched", exc)
            failed = Prefetch(names)
            failed.count(failed=failed.report().total, error=exc)
            return failed

    # -- saving

    def save(
        self,
        key: str,
        entry: Frame | Buffer,
        *,
        level: EntryKind = "aot",
        delayed: bool = False,
        remote: bool = True,
        once: bool = False,
        replaces: Sequence[Frame] = (),
    ) -> Saved | NotSaved:
        """Save like :meth:`Cache.save`; without ``remote``, on this machine only.

        The entry also takes the place of those in ``replaces``, under their variants. (Most writers
        may not delete from a bucket.)

        With ``once``, keep an entry that another process has saved since the lookup.
        With ``delayed``, upload after a minute, at the next flush or at the exit: another entry may
        replace it before.
        """
        started, counters = time.perf_counter(), self._counters_of[level]
        size, durable, reason, error = 0, None, Reason.DISABLED, None
        try:
            found = entry if isinstance(entry, Frame) else frame.decode(entry)
            entries.check_entry(key, found)
            size = found.size
            if not (self._closed or self.settings.mode in ("off", "read-only")):
                durable = self._write(found, delayed=delayed, share=remote, once=once)
                for former in replaces:
                    self._local.discard(former)
                    if (variant := former.header.variant) != found.header.variant:
                        copy = frame.with_variant(found, variant)
                        self._write(copy, delayed=delayed, share=remote)
        except Exception as exc:
            if not size and not isinstance(exc, MemoryError):
                raise  # the caller's mistake: a bad entry, or another key
            if not self.settings.strict:
                self._problems.warn("save", "an entry could not be saved", exc)
            reason, error = reason_for(exc), exc
        elapsed_s = time.perf_counter() - started
        if durable is not None:
            counters.add(saved=1, saved_bytes=size, save_latency=elapsed_s)
            if remote:
                self.events.used.tell(key, found.header.variant)
            return Saved(durable, elapsed_s)
        counters.add(reason, not_saved=1, save_latency=elapsed_s)
        if self.settings.strict and error is not None:
            raise error
        return NotSaved(reason, elapsed_s, error)

    def _write(
        self, entry: Frame, *, delayed: bool, share: bool, once: bool = False
    ) -> bool | None:
        """Store the entry; return whether it survives this process, None if there is no tier."""
        # Sign here and never at the upload: pending entries of other processes are not ours to
        # sign.
        data = self._signed(entry).data
        name = entries.variant_name(entry.header.key, entry.header.variant)
        share = share and self._open_remote is not None
        # If the remote cannot be opened now, it may be later, or by a later process.
        remote, error = self._try_remote() if share else (None, None)
        is_new = True

        def put(disk: DiskTier) -> None:
            nonlocal is_new
            if share:
                is_new = disk.put_pending(name, data, once=once)
            else:
                disk.put(name, data)

        if remote is not None and self._uploads is not None:
            with self._uploads.saving(name):
                durable = self._local.write(put)
                if is_new:
                    delay_s = _DELAY_S if delayed else 0.0
                    self._uploads.add(name, None if durable else data, delay_s=delay_s)
            return durable
        durable = self._local.write(put)
        if not durable:
            if error := error or self._local.error:
                raise error
            return None
        if share and is_new:
            self._unsent.add(name)
        return durable

    def _signed(self, entry: Frame) -> Frame:
        """Return ``entry`` with our signature, if we have a key; unsigned if that fails."""
        if self._signer is None:
            return entry
        times = {"issued_s": int(time.time()), "ttl_s": int(self.settings.signature_ttl_s)}
        try:
            signature = sign(entry.digest, self._signer, audience=self.settings.audience, **times)
        except UntrustedError as exc:
            if self._policy.level == "require":  # an unsigned entry would be useless
                raise
            self._problems.warn("signing", "an entry is saved unsigned", exc)
            return entry
        return frame.decode(frame.signed(entry, lambda _: pack([signature])))

    # -- removing

    def remove_all(self, prefix: str) -> int:
        """Remove all entries with names that begin with ``prefix``; return their number."""
        if self._closed:
            raise ClosedError("the cache was closed")
        if self.settings.mode in ("off", "read-only"):
            raise ReadOnlyError(f"the mode is {self.settings.mode}", op="remove")
        self.flush(self.settings.exit_timeout_s)
        remote, disk = self._remote_now(), self._local.disk
        names = set() if remote is None else {*remote.remove(prefix)}
        if disk is not None:
            for info in disk.objects(prefix):
                disk.delete(info.key)
                names.add(info.key)
        return len(names)

    # -- counting

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self._listeners.add(listener)

    def stats(self) -> CacheStats:
        usage = self._local.read(DiskTier.usage, None)
        more: dict[str, object] = {"local": usage, "fx": self._counters_of["fx"].read(LevelStats)}
        more["features"] = {each.name: self.counts[each.name].snapshot() for each in features()}
        levels = {kind: self._counters_of[kind].read(LevelStats) for kind in kinds()}
        more["kinds"] = {kind: of for kind, of in levels.items() if of.lookups or of.saved}
        if self._uploads is not None:
            more["pending"] = self._uploads.pending
        if (remote := self._remote) is not None:
            more |= {"breaker": remote.breaker.state, "remote": remote.metered.snapshot()}
        return self._counters.read(CacheStats, **more)

    # -- the life of a cache

    def start(self) -> None:
        remote, error = self._try_remote()
        if isinstance(error, ConfigError):
            raise error
        if remote is not None:
            remote.connect_soon()

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        self.events.finishing.tell()
        if self.settings.mode in ("off", "read-only"):
            return FlushReport(0, 0, None)
        if self._closed:
            return self._last_report
        error = None
        if self._uploads is None and self._unsent:
            _, error = self._try_remote()
        if self._uploads is None:
            return FlushReport(len(self._unsent), 0, error)
        return self._uploads.flush(timeout_s)

    def close(self, timeout_s: float | None = None) -> FlushReport:
        if not self._closed:
            limit_s = self.settings.exit_timeout_s if timeout_s is None else timeout_s
            end = time.monotonic() + limit_s + _RELEASE_S
            try:
                self._last_report = self.flush(limit_s)
            finally:
                self._release(end)
        return self._last_report

    def _at_exit(self) -> None:
        self.events.finishing.tell()
        limit_s = self.settings.exit_timeout_s
        end = time.monotonic() + limit_s + _RELEASE_S
        if self._remote is not None and self._uploads is not None:
            report = self._last_report = self._uploads.flush(limit_s, until_a_pause=True)
            if report.remaining:
                logger.warning(
                    "unfinished uploads to %s: %d; recorded for the next process on this machine: "
                    "%d; lost: %d",
                    self._remote.url,
                    report.remaining,
                    report.remaining - report.in_memory,
                    report.in_memory,
                )
        self._release(end)

    def _release(self, end: float) -> None:
        with self._mutex:
            if self._closed:
                return
            self._closed = True
        self._forget_exit()
        self._records.close(_RECORDS_S)
        for tier in (self._uploads, self._remote, self._local.disk):
            if tier is not None:
                tier.close(max(end - time.monotonic(), _MOMENT_S))

    def _remote_now(self) -> RemoteTier | None:
        """Return the remote tier; the first call in this process opens it."""
        if self._open_remote is None:
            return None
        with self._mutex:
            if self._remote is None and not self._closed:
                remote = RemoteTier(
                    self._open_remote(),
                    self.settings,
                    local=self._local,
                    replaceable=self._replaceable,
                    listeners=self._listeners,
                )
                self._uploads = Uploads(
                    remote.loop,
                    remote.verify,
                    remote.publish,
                    self.settings,
                    disk=self._local.disk,
                    listeners=self._listeners,
                    on_problem=self._upload_failed,
                    before_flush=remote.store.forget_failures,
                )
                self._remote = remote
                if self.settings.mode != "read-only":
                    self._uploads.start(self._unsent)
                self.events.remote_opened.tell(remote)
            return None if self._closed else self._remote

    def _count_transfer(self, event: TransferEvent) -> None:
        if event.step == "done" and not entries.key_of(event.name).startswith(hints()):
            name = f"{event.direction}ed"
            self._counters.add(**{name: 1, f"{name}_bytes": event.size})

    def _upload_failed(self, error: Exception) -> None:
        self._counters.add(upload_failures=1)
        if isinstance(error, TooLargeError):
            found = "an entry stays on this machine only, and is not sent again"
            self._problems.warn("too large", found, error)
        else:
            self._problems.warn("upload", "an upload failed", error)

    def _try_remote(self) -> tuple[RemoteTier | None, Exception | None]:
        """Return the remote tier, or the error that keeps it from opening."""
        try:
            return self._remote_now(), None
        except Exception as exc:  # noqa: BLE001 - whatever it is, the user's program goes on
            self._problems.met("remote", "the remote cannot be opened", exc)
            return None, exc

    # -- for torch's hooks and features

    @property
    def local(self) -> LocalTier:
        """The local tier; its disk may be missing."""
        return self._local

    def remote(self) -> RemoteTier | None:
        """Return the remote tier, or None if there is none or it cannot be opened."""
        return self._try_remote()[0]

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def may_resign(self) -> bool:
        """Whether an entry of another machine stays equally trusted if we save it again."""
        return self._signer is not None or self._policy.level == "off"

    @property
    def has_remote(self) -> bool:
        """Whether a remote is configured; it may not answer."""
        return self._open_remote is not None

    def probe(self, key: str) -> str:
        """Return where an entry under ``key`` is, or why none is used; count nothing."""
        counters = Counters()
        with self.candidates(key, counters=counters) as lookup:
            for hit in lookup:
                return hit.tier
        counts = counters.read(LevelStats)
        causes = ", ".join(f"{count} {cause}" for cause, count in counts.refused.items())
        (reason,) = counts.misses
        return f"{reason} ({causes})" if causes else str(reason)

    def keep(self, entry: Frame) -> None:
        """Save an entry like :meth:`Cache.save`, without counting it; raise if that fails."""
        if not (self._closed or self.settings.mode in ("off", "read-only")):
            self._write(entry, delayed=False, share=True)

    def replace(self, entry: Frame, better: Buffer) -> None:
        """Replace ``entry`` with a frame of the same variant, here and in the remote."""
        self._replaceable.add(entry.digest)
        try:
            self.keep(frame.decode(better))
        except Exception as exc:  # noqa: BLE001 - the former entry is as right
            self._problems.met("save", "an entry could not be replaced", exc)

    def withdraw(self, key: str, variant: str) -> None:
        """Remove an entry that was saved here and is delayed, unless its upload is under way."""
        name = entries.variant_name(key, variant)
        try:
            if self._uploads is not None:
                is_removed = self._uploads.cancel_delayed(name)
            else:
                is_removed = self._local.write(lambda disk: disk.delete(name))
        except Exception as exc:  # noqa: BLE001 - then it is uploaded, which does no harm
            self._problems.met("local", "an entry that was replaced cannot be removed", exc)
        else:
            if is_removed:
                self.events.dropped.tell(key, variant)

    def set_aside(self, entry: Frame, why: str, *, is_proven: bool) -> str:
        """Use an entry no more that raised at its first call; return what becomes of it elsewhere.

        No process of this machine uses it again. If it ``is_proven`` that the entry is at fault, it
        is also deleted from the remote; otherwise the next entry that is saved here replaces it.
        """
        self._local.mark(entry, why)
        remote, error = self._try_remote()
        if remote is None and error is None:
            return "it is set aside"
        if is_proven and remote is not None and self.settings.mode == "read-write":
            try:
                remote.discard(entries.names_of(entry.header), entry.digest, _DISCARD_S)
            except StoreError as exc:
                error = exc
            else:
                return "it is set aside, and deleted from the bucket"
        why = f" ({error})" if error is not None else ""
        return (
            f"it is set aside on this machine, and stays in the bucket{why}: "
            f"to delete it, run `s3cache rm {entry.header.key}`"
        )

    def contain(self, key: str, variant: str) -> None:
        """Note that a saved FX graph is part of a saved whole graph.

        It stays, because other graphs may share it. The next process does not fetch it early.
        """
        self.events.dropped.tell(key, variant)
        self._counters_of["fx"].add(contained=1)

    def count_bypass(self, reasons: Iterable[str], level: EntryKind = "aot") -> None:
        """Count a graph that cannot be cached, by the codes of the reasons."""
        self._counters_of[level].add(bypassed=1)
        for reason in {*reasons}:
            self._counters_of[level].add(reason, bypass_reasons=1)

    def count_time_saved(self, seconds: float) -> None:
        """Count the compile time that a hit has saved."""
        self._counters.add(time_saved_s=seconds)

    def record(self, what: Record | Event | dict[str, object]) -> None:
        """Record a lookup or an event, in the background."""
        if self.settings.record:
            self._records.add(what)

    def recorded(self) -> Run:
        """Return the last few hundred lookups of this process, oldest first; any thread."""
        return Run(self._records.run, self._records.held())


class Cache:
    """Frames under keys, on this machine and in a bucket.

    Any thread may use it; listeners must not wait for it. A forked child has its own connections,
    background thread, counts and listeners. An error becomes a reason, a count and one warning;
    with strict settings it is raised.

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

        ``options`` are those of :class:`~s3cache.settings.Settings` and of the store.

        Raises:
            ConfigError: the URL, an option or an environment variable cannot be used.
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
        location = parse_url(where, **store_options)
        cache = cls(
            settings,
            open_remote=lambda: open_store(where, **store_options),
            identity=location.identity,
            used=used,
        )
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

        Raises:
            ConfigError: ``key`` is not legal.
            S3CacheError: with ``strict``, the lookup missed for a reason other than absence.
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

        Raises:
            ConfigError: the remote cannot be used as it is configured.
            S3CacheError: with ``strict``, the remote cannot be opened.
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
