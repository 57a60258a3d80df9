"""Find the entry with the key nearest to one that missed, of those that this machine knows."""

from __future__ import annotations

import concurrent.futures
import contextlib
import difflib
import functools
import heapq
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from s3cache import entries, frame
from s3cache.artifact import Artifact
from s3cache.catalog import Place, open_place, read_head
from s3cache.errors import ConfigError, CorruptError, S3CacheError, UntrustedError
from s3cache.explaining._differences import GRAPH, Described, likeness, unlikeness
from s3cache.frame import Frame, Header
from s3cache.records import Record
from s3cache.settings import Options, Settings
from s3cache.store import listing
from s3cache.transfer import background

__all__ = ["Kept", "Known", "nearest"]

# Of so many that are equally near, the latest ones, parts and code are compared.
_COMPARED = 16
_COMPARED_CHARACTERS = 20_000


@dataclass(frozen=True)
class Known:
    """An entry that this machine has looked up, or has.

    Attributes:
        where: it is known from, in words.
        time: Unix time since when.
    """

    key: str
    level: str
    described: Described
    where: str
    time: float


def nearest(
    missed: Record, known: Iterable[Known], complete: Callable[[Known], Known]
) -> Known | None:
    """That with the same graph, else with the most components in common.

    Of several it is the one whose other components differ in the fewest of their parts, else the
    latest. Only what was there before counts.

    Args:
        complete: gives what is known with the parts that are not at hand.
    """
    wanted = Described(missed.components, missed.parts)
    ranked = sorted(
        (
            (likeness(each.described, wanted), each.time, index, each)
            for index, each in enumerate(known)
            if each.level == missed.level and each.key != missed.key and each.time < missed.time
        ),
        reverse=True,
    )
    if not ranked:
        return None
    (is_same, common), *_ = ranked[0]
    # Of another graph parts cannot say as much as its code: one that is as near otherwise counts.
    least = common if is_same else common - 2
    equals = [each for near, *_, each in ranked if near >= (is_same, least)][:_COMPARED]
    code = "" if is_same else _code(wanted)

    def nearness(each: Known) -> tuple[object, ...]:
        alike = 0.0 if is_same else _ratio(_code(each.described), code)
        is_unknown, count = unlikeness(each.described, wanted)
        return alike, likeness(each.described, wanted), not is_unknown, -count, each.time

    return max(map(complete, equals), key=nearness)


def _code(of: Described) -> str:
    return of.parts.get(GRAPH, {}).get("code", "")[:_COMPARED_CHARACTERS]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.splitlines(), other.splitlines(), False).ratio()


# -- the entries of the local tier


# Headers are read of so many, those that were used last: some megabytes.
_HEADERS_AT_MOST = 256
# Of so many one reads, for all misses of a run together, what components consist of; none larger.
_WHOLE_AT_MOST = 64
_WHOLE_BYTES = 64 << 20
_TIMEOUT_S = 20.0
_WHERE = "the local tier"


@dataclass
class _Found:
    names: dict[str, str] = field(default_factory=dict)
    known: list[Known] = field(default_factory=list)


class Kept:
    """Reads the local tier, until it fails once; what is not trusted or damaged is passed over.

    Nothing is read before it is asked for, and nothing that is read counts as used.
    """

    def __init__(self, settings: Settings, options: Options) -> None:
        self._options: Options = {**options}
        self._is_there = settings.local and os.path.isdir(settings.local_dir)
        self._parts: dict[str, Mapping[str, Mapping[str, str]]] = {}

    def known(self, but: Collection[tuple[str, str]]) -> list[Known]:
        """The entries used last, without those of these levels and keys, and without parts."""
        return [each for each in self._found.known if (each.level, each.key) not in but]

    def complete(self, known: Known) -> Known:
        """``known``, with what its components consist of, if its entry is there and says so."""
        if known.described.parts:
            return known
        if known.key not in self._parts and len(self._parts) < _WHOLE_AT_MOST:
            self._parts[known.key] = self._parts_of(known.key)
        parts = self._parts.get(known.key, {})
        return replace(known, described=replace(known.described, parts=parts))

    @functools.cached_property
    def _place(self) -> Place:
        return open_place(in_tier=True, of_all=True, **self._options)

    def close(self) -> None:
        """Let go of the tier."""
        if "_place" in vars(self):
            with contextlib.suppress(S3CacheError):
                self._place.close()

    @functools.cached_property
    def _found(self) -> _Found:
        found = _Found()
        if self._is_there:
            with contextlib.suppress(S3CacheError, concurrent.futures.TimeoutError):
                background().wait(self._look(self._place, found), _TIMEOUT_S)
        return found

    async def _look(self, place: Place, found: _Found) -> None:
        async with listing(place.store, "") as objects:
            infos = [info async for info in objects]
        found.names.update((entries.key_of(info.key), info.key) for info in infos)
        for info in heapq.nlargest(_HEADERS_AT_MOST, infos, key=attrgetter("modified")):
            with contextlib.suppress(CorruptError, UntrustedError, ConfigError):
                head = await read_head(place.store, info.key, place.policy.judge)
                if head is not None and (known := _known(head.header)) is not None:
                    found.known.append(known)

    def _parts_of(self, key: str) -> Mapping[str, Mapping[str, str]]:
        name = self._found.names.get(key)
        if name is None:
            return {}
        with contextlib.suppress(S3CacheError, concurrent.futures.TimeoutError):
            return background().wait(self._read(self._place, name), _TIMEOUT_S)
        return {}

    async def _read(self, place: Place, name: str) -> Mapping[str, Mapping[str, str]]:
        data = await place.store.get(name, lambda size: size <= _WHOLE_BYTES)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            return {}
        entry: Frame = frame.decode(data, admit=place.policy.judge)
        return Artifact.parts_of(entry)


def _known(header: Header) -> Known | None:
    """What the header of an entry says, if its key is made of components."""
    pairs = header.meta.get("components")
    components = {
        str(name): (str(pair[0]), str(pair[1]))
        for name, pair in (pairs.items() if isinstance(pairs, Mapping) else ())
        if isinstance(pair, (list, tuple)) and len(pair) == 2
    }
    if not components:
        return None
    created = header.created_ns / 1e9
    return Known(header.key, header.kind, Described(components), _WHERE, created)
