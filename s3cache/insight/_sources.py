"""Find the entry with the key nearest to one that missed, among those that this machine knows."""

from __future__ import annotations

import concurrent.futures
import contextlib
import difflib
import functools
import heapq
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

from s3cache import entries, frame
from s3cache.artifact import Artifact
from s3cache.errors import CorruptError, S3CacheError, UntrustedError
from s3cache.frame import Header
from s3cache.insight._differences import GRAPH, likeness, unlikeness
from s3cache.manage import Place, concurrently, read_head
from s3cache.records import Record, Run
from s3cache.store import ObjectInfo, listing
from s3cache.tier import background

_T = TypeVar("_T")

# Details and code are compared of so many entries that are equally near, the latest ones.
_COMPARED = 16
_COMPARED_CHARACTERS = 20_000
# A listing ends after so many names; a page of S3 has a thousand.
_MAX_NAMES = 8000
# Headers are read of so many entries, the latest ones: some megabytes.
_MAX_HEADERS = 256
# For all misses of a run together, so many entries are read whole, each up to this size.
_MAX_WHOLE = 64
_MAX_WHOLE_BYTES = 64 << 20
# For everything that is read of one place.
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Neighbor:
    """An entry that a miss is compared with, as a record of it, and where it is known from."""

    record: Record
    where: str


def nearest(
    missed: Record, neighbors: Iterable[Neighbor], complete: Callable[[Neighbor], Neighbor]
) -> Neighbor | None:
    """Return the neighbor with the same graph, else the one with the most components in common.

    Among several, choose the one with the fewest differing details in other components, else the
    latest. Only entries older than the miss count.

    Args:
        complete: adds the details of a neighbor's components, where they can be read.
    """
    ranked = sorted(
        (
            (likeness(each.record, missed), each.record.time, index, each)
            for index, each in enumerate(neighbors)
            if each.record.level == missed.level
            and each.record.key != missed.key
            and each.record.time < missed.time
        ),
        reverse=True,
    )
    if not ranked:
        return None
    (is_same, common), *_ = ranked[0]
    # The code of another graph says more than components: let near ones compete by their code.
    least = common if is_same else common - 2
    equals = [each for near, *_, each in ranked if near >= (is_same, least)][:_COMPARED]

    def nearness(neighbor: Neighbor) -> tuple[object, ...]:
        each = neighbor.record
        alike = 0.0
        if not is_same:
            codes = _code_of(each), _code_of(missed)
            alike = difflib.SequenceMatcher(None, *codes, autojunk=False).ratio()
        is_unknown, count = unlikeness(each, missed)
        return alike, likeness(each, missed), not is_unknown, -count, each.time

    return max(map(complete, equals), key=nearness)


def _code_of(record: Record) -> list[str]:
    return record.parts.get(GRAPH, {}).get("code", "")[:_COMPARED_CHARACTERS].splitlines()


def recorded_neighbors(runs: Iterable[Run]) -> list[Neighbor]:
    """Return the recorded lookups; a hit has the details of the miss that led to it."""
    found: dict[tuple[str, str], Neighbor] = {}
    for run in runs:
        where = f"run {run.name}" if run.name else "this process"
        for record in filter(lambda each: each.components, run.records):
            first = found.setdefault((record.level, record.key), Neighbor(record, where))
            parts = first.record.parts or record.parts
            both = replace(record, parts=parts, time=min(first.record.time, record.time))
            found[record.level, record.key] = replace(first, record=both)
    return list(found.values())


class EntrySource:
    """Find neighbors among the entries of the local tier or of the remote, by their headers.

    Nothing is read before it is needed, reading does not count as use, and nothing more is read
    after the first failure, which :attr:`problem` says. Entries that are damaged or not trusted are
    skipped.
    """

    def __init__(self, where: str, open_place: Callable[[], Place] | None) -> None:
        self._where = where
        self._open = open_place
        self._place: Place | None = None
        self._deadline = 0.0
        self._names: dict[str, str] = {}
        self._parts: dict[str, Mapping[str, Mapping[str, str]]] = {}
        self.problem = ""

    def close(self) -> None:
        """Close the place."""
        if self._place is not None:
            self._place.close()

    @functools.cached_property
    def neighbors(self) -> list[Neighbor]:
        """Return the latest entries, without details."""
        found: list[Neighbor] = []
        if self._open is not None:
            self._deadline = time.monotonic() + _TIMEOUT_S
            try:
                self._place = self._open()
            except S3CacheError as exc:
                self.problem = str(exc)
            else:
                self._wait(self._look(self._place, found))
        return found

    def complete(self, neighbor: Neighbor) -> Neighbor:
        """Return ``neighbor`` with the details of its components, if its entry is here."""
        record = neighbor.record
        name = self._names.get(record.key)
        if record.parts or name is None or self._place is None:
            return neighbor
        if name not in self._parts and len(self._parts) < _MAX_WHOLE and not self.problem:
            self._parts[name] = self._wait(self._read(self._place, name)) or {}
        return replace(neighbor, record=replace(record, parts=self._parts.get(name, {})))

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Return its result, or None with :attr:`problem` set if it fails or time is over."""
        try:
            return background().wait(work, max(0.0, self._deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            self.problem = f"not all of it was read within {_TIMEOUT_S:g} s"
        except S3CacheError as exc:
            self.problem = str(exc)
        return None

    async def _look(self, place: Place, found: list[Neighbor]) -> None:
        infos: list[ObjectInfo] = []
        # A local tier has the entries of each remote in a directory of their own.
        async with listing(place.store, "" if place.is_local else entries.NAMES) as objects:
            async for info in objects:
                infos.append(info)
                if len(infos) == _MAX_NAMES and not place.is_local:
                    break
        self._names.update((entries.key_of(info.key), info.key) for info in infos)

        async def read(info: ObjectInfo) -> None:
            with contextlib.suppress(CorruptError, UntrustedError):
                head = await read_head(place.store, info.key, place.policy.check)
                if head is not None and (record := _record_of(head.header)):
                    found.append(Neighbor(record, self._where))

        await concurrently(read, heapq.nlargest(_MAX_HEADERS, infos, key=attrgetter("modified")))

    async def _read(self, place: Place, name: str) -> Mapping[str, Mapping[str, str]]:
        data = await place.store.get(name, lambda size: size <= _MAX_WHOLE_BYTES)
        if isinstance(data, (bytes, bytearray, memoryview)):
            with contextlib.suppress(CorruptError, UntrustedError):
                return Artifact.parts_of(frame.decode(data, admit=place.policy.check))
        return {}


def _record_of(header: Header) -> Record | None:
    """Return an entry as a record, if its key is made of components."""
    pairs = header.meta.get("components")
    components = {
        str(name): (str(pair[0]), str(pair[1]))
        for name, pair in (pairs.items() if isinstance(pairs, Mapping) else ())
        if isinstance(pair, (list, tuple)) and len(pair) == 2
    }
    if not components:
        return None
    created = header.created_ns / 1e9
    return Record(header.kind, "hit", header.key, time=created, components=components)
