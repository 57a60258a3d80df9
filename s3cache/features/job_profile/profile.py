"""Job profiles: the lookups of a program, so that its next process fetches the entries at once.

A profile is an entry of kind ``job``. Its key is computed before the first compile. Its section
``lookups`` is msgpack: a list of the key and variant of each entry that was used, in order. It is
signed and verified like every entry, and only lists downloads: each download is verified too.

A program may have several profiles. The newest one is used until the entries that the process uses
are those of an older one, as with another configuration; then the older one is used, and is saved
again. So configurations that alternate leave equal profiles with another one between them. A
process that finds these fetches what all of them name, and the rest once it has used an entry.

Jobs that may only add objects write profiles too, so every profile is a new object. The name of a
program's first profile is computed, so it can be fetched while the names are listed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgpack  # type: ignore[import-untyped]

from s3cache import entries, frame
from s3cache.errors import CorruptError, S3CacheError, UntrustedError
from s3cache.features.job_profile.program import program_key
from s3cache.frame import Frame
from s3cache.store import AcceptSize, NotAccepted, Store
from s3cache.tier import Prefetch
from s3cache.util.logs import Problems, logger_of

if TYPE_CHECKING:
    from s3cache.cache import Engine
    from s3cache.store import ObjectInfo
    from s3cache.tier import RemoteTier

#: Key and variant of each entry that was used, in order.
Lookups: TypeAlias = "dict[tuple[str, str], None]"

_KIND, _SCHEMA = "job", 1

# Limits of a profile: its own size, the number of its lookups, and the bytes that it fetches.
_MAX_BYTES = 1 << 20
_MAX_LOOKUPS = 4096
_MAX_FETCHED_BYTES = 1 << 30
# A process stops fetching once it has used this many entries and the profile named none of them.
_ENOUGH = 8
# Profiles per program: we delete all but _KEPT, if we may, and add none to _FULL.
_KEPT, _FULL = 8, 64
# How many used entries are compared with each profile.
_COMPARED = 64
_LOCATING_S, _LOCATING_TRIES = 0.1, 600
# How soon, and at the latest how often, we look whether the first entry was used.
_LOOK_S, _LOOK_AT_MOST_S = 0.01, 0.5

#: A process saves its profile after this long without a lookup.
SETTLED_S = 30.0

logger = logger_of("storage")


def begin(engine: Engine) -> JobProfile | None:
    """Follow the profile of this process's program, and note what the process uses."""
    if not engine.has_remote:
        return None
    settings, mode, problems = engine.settings, engine.settings.mode, Problems(strict=False)

    def save() -> None:
        try:
            if (data := job.encode()) is not None:
                engine.keep(frame.decode(data))
        except Exception as exc:  # noqa: BLE001 - the next process waits longer, no more
            problems.warn("job", "the job profile is not saved", exc)

    saves = mode not in ("off", "read-only")
    job = JobProfile(
        reads=mode != "write-only" and not settings.recache and engine.local.is_writable,
        save=save if saves else None,
        settled_s=SETTLED_S,
        max_bytes=settings.local_max_bytes // 2,
        on_problem=lambda exc: problems.warn("job", "a job profile is not used", exc),
    )
    engine.events.used.subscribe(job.note)
    engine.events.dropped.subscribe(job.forget)
    engine.events.remote_opened.subscribe(lambda remote: remote.begin(lambda: job.follow(remote)))
    if saves:
        engine.events.finishing.subscribe(save)
    return job


class JobProfile:
    """The lookups of this process, and those that earlier profiles predict.

    Args:
        reads: whether to fetch the entries that a profile names.
        save: saves the result of :meth:`encode`. It is called on another thread after
            ``settled_s`` without a lookup, so that a process that is killed later has saved its
            profile. ``None`` if the process may not write.
        max_bytes: how many bytes may be fetched; fetching must not evict other entries.
        on_problem: called with the error if a profile cannot be used.
    """

    _remote: RemoteTier  # once it is open

    def __init__(
        self,
        *,
        reads: bool,
        save: Callable[[], None] | None,
        settled_s: float,
        max_bytes: int,
        on_problem: Callable[[Exception], None],
    ) -> None:
        self.lookups: Lookups = {}  # filled by any thread
        self._reads, self._save, self._settled_s = reads, save, settled_s
        self._left = min(max_bytes, _MAX_FETCHED_BYTES)
        self._on_problem = on_problem
        #: Whether we have looked for the newest profile. Until then none is saved.
        self.is_known = False
        self._mutex = threading.Lock()
        self._key = entries.LabelledKey()
        self._newest = ""  # the name of the newest profile when this process began
        self._is_full = False
        self._profiles: list[Lookups] = []  # newest first
        self._outdated: list[str] = []  # names of the oldest profiles

    def note(self, key: str, variant: str) -> None:
        """Note that an entry was used or saved; any thread."""
        if len(self.lookups) < _MAX_LOOKUPS:
            self.lookups[key, variant] = None

    def forget(self, key: str, variant: str) -> None:
        """Forget an entry that the next process need not fetch; any thread."""
        self.lookups.pop((key, variant), None)

    def encode(self) -> bytes | None:
        """Return a frame with the lookups so far, or None if a profile is good enough.

        It is if it has all of them, and they are its first ones or more than half of it. It must be
        the newest, unless configurations alternate.
        """
        with self._mutex:
            profiles, used = self._profiles, [*self.lookups][:_COMPARED]
            foreseen = next(iter(_best(profiles, used)), {})
            lookups = dict.fromkeys([*self.lookups.copy()][:_MAX_LOOKUPS])
            begun = {*itertools.islice(foreseen, len(lookups))}
            is_foreseen = lookups.keys() <= foreseen.keys() and (
                2 * len(lookups) > len(foreseen) or lookups.keys() == begun
            )
            is_foreseen &= foreseen in profiles[:1] or _alternate(profiles)
            if not (self.is_known and self._key and lookups) or self._is_full or is_foreseen:
                return None
            content: bytes = msgpack.packb([*lookups])
            # Equal for processes that began with the same profile, and new if an older profile has
            # the same lookups.
            variant = hashlib.sha256(self._newest.encode() + content).hexdigest()[:32]
            data = frame.encode(
                kind=_KIND,
                key=str(self._key),
                variant=variant,
                schema=_SCHEMA,
                sections={"lookups": content},
                meta={"components": self._key.about},
            )
            self._profiles, self._newest = [lookups], entries.variant_name(self._key, variant)
            return data

    # -- on the loop

    async def follow(self, remote: RemoteTier) -> None:
        """Fetch the entries that the best profile names; later save our own profile."""
        self._remote = remote
        try:
            for _ in range(_LOCATING_TRIES):
                if sys.argv[:1] != ["-m"]:  # Python is still looking for the module to run
                    break
                await asyncio.sleep(_LOCATING_S)
            self._key = await asyncio.to_thread(program_key)
            if self._key and self._reads:
                await self._load(remote.reader)
        except S3CacheError as exc:  # of the store: lookups report it
            logger.debug("no job profile: %s", exc)
        except Exception as exc:  # noqa: BLE001 - a task must not fail silently
            self._on_problem(exc)
        self.is_known = True
        await asyncio.gather(self._fetch_likely(), self._save_regularly(), self._remove_outdated())

    async def _save_regularly(self) -> None:
        count = -1
        while self._key and self._save is not None:
            await asyncio.sleep(self._settled_s)
            if count == (count := len(self.lookups)):
                await asyncio.to_thread(self._save)

    async def _remove_outdated(self) -> None:
        """Delete the oldest profiles, if we may; jobs often may not."""
        with contextlib.suppress(S3CacheError):
            for name in self._outdated if self._save is not None else ():
                await self._remote.reader.delete(name)

    async def _fetch_likely(self) -> None:
        """Fetch what the newest profile names, or another one as soon as it is a better match.

        If configurations alternate, fetch only what all profiles name that match as well.
        """
        profiles, used = self._profiles, list[tuple[str, str]]()
        best = profiles if _alternate(profiles) else profiles[:1]
        done = set[tuple[str, str]]()
        while best:
            likely = {each: None for each in best[0] if all(each in it for it in best)}
            if not likely.keys() <= done:
                try:
                    await self._fetch(likely, profiles)
                except Exception as exc:  # noqa: BLE001 - a task must not fail silently
                    self._on_problem(exc)
                    return
                done |= likely.keys()
            is_decided = used and all(it.keys() == likely.keys() for it in best)
            if is_decided or len(profiles) == 1 or len(used) == _COMPARED:
                return
            pause_s = _LOOK_S
            while len(self.lookups) == len(used):
                await asyncio.sleep(pause_s)
                pause_s = min(1.1 * pause_s, _LOOK_AT_MOST_S)
            used = [*self.lookups][:_COMPARED]
            best = _best(profiles, used)

    async def _load(self, store: Store) -> None:
        admit = self._remote.check_trust

        async def read(name: str) -> Lookups:
            data = await store.get(name, lambda size: size <= _MAX_BYTES)
            if isinstance(data, NotAccepted):
                raise CorruptError(f"object {name}", f"has more than {_MAX_BYTES} bytes")
            if data is None:
                return {}
            return await asyncio.to_thread(
                lambda: lookups_of(entries.verify(name, data, admit=admit))
            )

        first = entries.first_name(self._key)
        first_profile, infos = await asyncio.gather(
            read(first), _list_profiles(store, self._key), return_exceptions=True
        )
        # If we may not list, try the first profile alone.
        names = [first] if isinstance(infos, BaseException) else [info.key for info in infos]
        self._is_full = len(names) >= _FULL
        self._newest = next(iter(names), "")
        names, self._outdated = names[:_KEPT], names[_KEPT:]
        others = (read(name) for name in names if name != first)
        read_others = iter(await asyncio.gather(*others, return_exceptions=True))
        for profile in (first_profile if name == first else next(read_others) for name in names):
            if isinstance(profile, (CorruptError, UntrustedError)):
                self._on_problem(profile)
            elif isinstance(profile, BaseException):
                raise profile
            elif profile:
                self._profiles.append(profile)

    async def _fetch(self, likely: Lookups, profiles: list[Lookups]) -> None:
        """Fetch the first entry under each key, then the other variants."""
        remote, others = self._remote, list[str]()
        # The names of a key's variants by the name of its first entry.
        wanted = defaultdict[str, list[str]](list)
        for key, variant in likely:
            wanted[entries.first_name(key)].append(entries.variant_name(key, variant))

        def either_present(names: list[str]) -> list[str]:
            here = {*remote.present([each for name in names for each in (name, *wanted[name])])}
            return [name for name in names if name in here or here.issuperset(wanted[name])]

        async def fetch_some(name: str, accept: AcceptSize) -> Frame | NotAccepted | None:
            is_too_large = False
            if len(self.lookups) >= _ENOUGH and likely.keys().isdisjoint([*self.lookups]):
                return None
            used = [*self.lookups][:_COMPARED]
            if any(_matches(it, used) > _matches(likely, used) for it in profiles):
                return None

            def accept_some(size: int) -> bool:
                nonlocal is_too_large
                is_too_large = size > self._left
                is_accepted = not is_too_large and accept(size)
                self._left -= is_accepted * size
                return is_accepted

            entry = await remote.join_calmly(name, accept_some)
            if isinstance(entry, Frame) or (entry is None and not is_too_large):
                its = () if entry is None else entries.names_of(entry.header)
                others.extend(each for each in wanted.get(name, ()) if each not in its)
            return None if is_too_large else entry

        for names, present in ([*wanted], either_present), (others, remote.present):
            await Prefetch(names).run(fetch_some, present, remote.budget, remote.concurrency)


def _matches(profile: Lookups, used: list[tuple[str, str]]) -> int:
    return sum(each in profile for each in used)


def _best(profiles: list[Lookups], used: list[tuple[str, str]]) -> list[Lookups]:
    """Return the profiles that name most of the used entries, in the same order."""
    most = max((_matches(it, used) for it in profiles), default=0)
    return [it for it in profiles if _matches(it, used) == most]


def _alternate(profiles: list[Lookups]) -> bool:
    """Return whether a profile was saved again after another one."""
    return any(
        first.keys() == later.keys()
        for number, first in enumerate(profiles)
        for later in profiles[number + 2 :]
    )


def lookups_of(entry: Frame) -> Lookups:
    """Return the lookups in a verified profile; raise CorruptError if it is none."""
    where = f"job profile {entry.header.variant}"
    if (entry.header.kind, entry.header.schema) != (_KIND, _SCHEMA):
        raise CorruptError(where, f"is of kind {entry.header.kind!r}")
    try:
        if sum(section.raw_size for section in entry.header.sections) > _MAX_BYTES:
            raise ValueError("it is too large")
        # The limit bounds the memory that nested arrays can allocate.
        found = msgpack.unpackb(entry.section("lookups"), max_array_len=_MAX_LOOKUPS)
        lookups = dict.fromkeys((key, variant) for key, variant in found)
        if not all(entries.is_legal(*each) for each in lookups):
            raise ValueError("it has an illegal key or variant")
    except (KeyError, TypeError, ValueError, msgpack.UnpackException) as exc:
        raise CorruptError(where, f"cannot be read ({exc!r})") from None
    return lookups


async def _list_profiles(store: Store, key: str) -> list[ObjectInfo]:
    """List the profiles under ``key``, newest first; at most ``4 * _FULL``."""
    profiles: list[ObjectInfo] = []
    async for info in store.list(entries.name_prefix(key)):
        profiles.append(info)
        if len(profiles) >= 4 * _FULL:
            break
    return sorted(profiles, key=lambda info: info.modified, reverse=True)
