"""Describe how two keys differ, and find the entry with the key nearest to a lookup that missed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import difflib
import functools
import heapq
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from s3cache import entries, frame
from s3cache.artifact import Artifact
from s3cache.errors import CorruptError, S3CacheError, UntrustedError
from s3cache.frame import Header
from s3cache.manage import EntryLocation
from s3cache.records import Record, Run
from s3cache.store import ObjectInfo, concurrently
from s3cache.tier import background, read_head

_T = TypeVar("_T")

# The component that is the graph itself.
_GRAPH = "gm"
_SHOWN_CHARACTERS = 200
_DIFF_LINES = 200


@dataclass(frozen=True)
class Difference:
    """One difference between two keys.

    Attributes:
        text: the difference, in one line.
        old, new: the value of the entry, and that of the lookup.
        diff: lines of code that differ, in the format of ``diff -u``.
        follows: whether another difference causes this one.
    """

    component: str
    text: str
    old: str = ""
    new: str = ""
    diff: str = ""
    follows: bool = False

    def as_dict(self) -> dict[str, object]:
        """Return the attributes that are not empty."""
        return {name: value for name, value in vars(self).items() if value}


def differences(old: Record, new: Record) -> list[Difference]:
    """Return the differences between the key of an entry, ``old``, and the key of a lookup.

    Differences that another one causes come last: another torch has other options.
    """
    names = dict.fromkeys([*_LABELS, *sorted({*old.components, *new.components})])
    differing = [name for name in names if _digest(old, name) != _digest(new, name)]
    implied = {name for cause in differing for name in _IMPLIED.get(cause, ())}
    found = []
    for name in differing:
        # A component without a result from its own function is described like any other.
        own = [*_OWN_WAYS[name](name, old, new)] if name in _OWN_WAYS else []
        own = own or [*_in_general(name, old, new)]
        found += [replace(each, follows=name in implied) for each in own]
    return sorted(found, key=lambda each: each.follows)


def _digest(of: Record, name: str) -> str:
    return of.components.get(name, ("", ""))[0]


def _parts(of: Record, name: str) -> Mapping[str, str]:
    return of.parts.get(name, {})


def _text(of: Record, name: str) -> str:
    return _parts(of, name).get("", of.components.get(name, ("", ""))[1])


_IMPLIED = {
    "torch.version": {
        *("torch.build", "torch.cxx_abi", "torch_version", "system_info", "torch.overrides"),
        *("inductor_config", "autograd_config", "dynamo.config", "shapes.config"),
    },
    "machine.isa": {"torch.cpu_capability"},
    "machine.arch": {"machine.isa", "torch.cpu_capability", "torch.build", "python.abi"},
}
# Labels of components for users; these components are shown first, in this order.
_LABELS = {
    "s3cache.schema": "format of entries (the release of s3cache)",
    "torch.version": "torch",
    "python.abi": "Python",
    "machine.isa": "CPU",
    "torch.cpu_capability": "CPU capability (ATEN_CPU_CAPABILITY)",
    "inductor_config": "inductor",
    "autograd_config": "functorch",
    _GRAPH: "graph",
    "example_inputs": "example_inputs",
    "torch.num_threads": "number of threads (torch.set_num_threads, OMP_NUM_THREADS)",
    "inductor_config_comms": "inductor.aten_distributed_optimizations",
    "aot_config": "AOTAutograd",
    "cache_key_tag": "torch.compiler.config.cache_key_tag",
    "grad_enabled": "gradients enabled",
    "deterministic_algorithms_settings": "torch.use_deterministic_algorithms",
    "graph.operators": "custom operators",
    "graph.functions": "functions that the graph calls",
    "graph.versions": "versions given to register_cacheable",
    "torch.overrides": "functions of torch that were replaced",
    "torch.precision": "fp32_precision",
}
# The details of these list only values that differ from a default: `1 → 2`.
_OPTIONS = ("inductor_config", "autograd_config")


# -- the ways to describe a component


def _in_general(name: str, old: Record, new: Record) -> Iterator[Difference]:
    """Describe a component by its details, or else as a whole."""
    label = _LABELS.get(name, name)
    before, now = _text(old, name), _text(new, name)
    ours, theirs = _parts(old, name), _parts(new, name)
    if name in _OPTIONS:
        ours, theirs = _with_defaults(ours, theirs), _with_defaults(theirs, ours)
    elif "" in ours or "" in theirs or not (ours or theirs):
        ours, theirs = _fields(before), _fields(now)
    is_known = (ours or not before) and (theirs or not now)
    differing = [each for each in {**ours, **theirs} if ours.get(each) != theirs.get(each)]
    if is_known and differing:
        for part in differing:
            of = f"{label}: {part}" if " " in label else f"{label}.{part}".rstrip(".")
            yield _arrow(name, of, ours.get(part, ""), theirs.get(part, ""))
    elif before != now:
        yield _arrow(name, label, before, now)
    else:
        yield Difference(name, f"{label} differs in a part that is not shown: {_short(now)}")


def _arrow(name: str, label: str, old: str, new: str) -> Difference:
    text = f"{label} {_short(old)} → {_short(new)}"
    if all(re.fullmatch(_DIGEST, each.strip("'")) for each in (old or new, new or old)):
        how = "has another definition" if old and new else "is missing" if old else "is new"
        text = f"{label} {how}"
    return Difference(name, text, old, new)


def _short(text: str) -> str:
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return cut or "none"


def _with_defaults(options: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return the values of options, with the defaults of those that only ``others`` set."""
    defaults = {name: text.partition(" → ")[0] for name, text in others.items()}
    values = {name: text.partition(" → ")[2] for name, text in options.items()}
    return dict(sorted({**defaults, **values}.items()))


def _instructions(name: str, old: Record, new: Record) -> Iterator[Difference]:
    before, now = _text(old, name).split(), _text(new, name).split()
    lacks = " ".join(each for each in before if each not in now)
    has = " ".join(each for each in now if each not in before)
    details = [f"lacks {_short(lacks)}"] if lacks else []
    details += [f"also has {_short(has)}"] if has else []
    if details:
        yield Difference(name, f"CPU {', '.join(details)}", lacks, has)


def _code(name: str, old: Record, new: Record) -> Iterator[Difference]:
    before, now = _parts(old, name).get("code", ""), _parts(new, name).get("code", "")
    if not (before and now):
        return
    codes = before.strip().splitlines(), now.strip().splitlines()
    lines = [*difflib.unified_diff(*codes, "entry", "here", lineterm="", n=1)][2:]
    count = max(sum(line[:1] == sign for line in lines) for sign in "+-")
    text = f"graph: {count} {'node differs' if count == 1 else 'nodes differ'}"
    if not count:
        text = "graph: the same code, but other functions, constants or attributes"
    diff = "\n".join(lines[:_DIFF_LINES])
    yield Difference(name, text, _text(old, name), _text(new, name), diff)


def _inputs(name: str, old: Record, new: Record) -> Iterator[Difference]:
    before, now = _parts(old, name), _parts(new, name)
    if not (before and now):
        return
    if len(before) != len(now):
        yield _arrow(name, "inputs:", str(len(before)), str(len(now)))
        return
    # The names of inputs in the program: `[L['x'], L['y']]`.
    names = _pieces(_parts(new, "aot_config").get("aot_autograd_arg_pos_to_source", "")[1:-1])
    called = {str(number): f" ({source})" for number, source in enumerate(names)}
    for number, text in now.items():
        if before.get(number, text) != text:
            label = f"input {number}{called.get(number, '')}:"
            yield from _tensor(name, label, before[number], text)


_TENSOR = "TensorMetadata("
# These follow from the shape of a tensor.
_OF_SHAPE = ("stride", "storage_bytes", "memory_format")


def _tensor(name: str, label: str, before: str, now: str) -> Iterator[Difference]:
    ours, theirs = (
        _fields(text[len(_TENSOR) : -1]) if text.startswith(_TENSOR) else {}
        for text in (before, now)
    )
    if not (ours and theirs):
        yield _arrow(name, label, before, now)
        return
    differing = [part for part in theirs if ours.get(part) != theirs[part]]
    for part in differing:
        if "shape" in differing and part in _OF_SHAPE:
            continue
        one, other = _plain(ours.get(part, "")), _plain(theirs[part])
        kind = "" if part in ("shape", "dtype", "device") else f" {part}"
        is_fixed = part == "shape" and not re.search(r"[^\d\s,()]", one + other)
        text = f"{label}{kind} {one} → {other}{', not marked dynamic' if is_fixed else ''}"
        yield Difference(name, text, one, other)


def _plain(text: str) -> str:
    if size := re.fullmatch(r"torch\.Size\(\[(.*)\]\)", text):
        return f"({size[1]},)" if size[1] and "," not in size[1] else f"({size[1]})"
    if device := re.fullmatch(r"device\(type='(\w+)'(?:, index=(\d+))?\)", text):
        return ":".join(filter(None, device.groups()))
    return text.removeprefix("torch.")


_OWN_WAYS: dict[str, Callable[[str, Record, Record], Iterator[Difference]]] = {
    "machine.isa": _instructions,
    _GRAPH: _code,
    "example_inputs": _inputs,
}


# -- parsing texts: `name=value` of a mode or a tensor; `operator: digest`


_DIGEST = r"[0-9a-f]{32}(?:[0-9a-f]{32})?"
_DIGESTED = re.compile(rf"(\S+?)(?:: |=)({_DIGEST})(?=[\s;,]|$)")
_ENCLOSED = r"""'[^']*'|"[^"]*"|\((?:[^()]|\([^()]*\))*\)|\[(?:[^][]|\[[^][]*\])*\]|\{[^{}]*\}"""
_PIECE = re.compile(rf"(?:{_ENCLOSED}|[^\s,])+")
_pieces = _PIECE.findall


def _fields(text: str) -> dict[str, str]:
    """Return values or digests by name if ``text`` is a list of such pairs; else nothing."""
    pairs = [piece.partition("=") for piece in _pieces(text)]
    are_fields = all(equals and re.fullmatch(r"[\w.]*", name) for name, equals, _ in pairs)
    return {one: value for one, _, value in pairs} if are_fields else dict(_DIGESTED.findall(text))


# -- the nearest entry among those of this machine and of the remote

# Among equally near entries, compare details and code of the latest ones, at most this many.
_COMPARED = 16
_COMPARED_CHARACTERS = 20_000
# A listing ends after this many names; a page of S3 has a thousand.
_MAX_NAMES = 8000
# Read the headers of the latest entries, at most this many: some megabytes.
_MAX_HEADERS = 256
# A larger entry is not read whole.
_MAX_WHOLE_BYTES = 64 << 20
# For all reads of the remote together.
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Neighbor:
    """An entry to compare a miss with: a record of it, and the source of that record."""

    record: Record
    where: str


def nearest(
    missed: Record, neighbors: Iterable[Neighbor], complete: Callable[[Neighbor], Neighbor]
) -> Neighbor | None:
    """Return the neighbor with the same graph, else the one with the most components in common.

    Among several, choose the one with the fewest differing details in other components, else the
    latest. Only entries older than the miss count.

    Args:
        complete: adds the details of a neighbor's components, if they can be read.
    """

    def likeness(neighbor: Neighbor) -> tuple[bool, int]:
        """Return whether the graphs are equal, and how many components are equal."""
        old, components = neighbor.record, missed.components.items()
        common = sum(digest == _digest(old, name) for name, (digest, _) in components)
        return _digest(old, _GRAPH) == _digest(missed, _GRAPH), common

    def nearness(neighbor: Neighbor) -> tuple[object, ...]:
        each, alike = neighbor.record, likeness(neighbor)
        texts = [_parts(of, _GRAPH).get("code", "") for of in (each, missed)]
        codes = [[] if alike[0] else text[:_COMPARED_CHARACTERS].splitlines() for text in texts]
        ratio = difflib.SequenceMatcher(None, codes[0], codes[1], autojunk=False).ratio()
        details = sum(found.component != _GRAPH for found in differences(each, missed))
        return ratio, alike, bool(each.parts), -details, each.time

    same_level = [each for each in neighbors if each.record.level == missed.level]
    others = [each for each in same_level if each.record.key != missed.key]
    older = [(likeness(it), it.record.time, it) for it in others if it.record.time < missed.time]
    if not older:
        return None
    older.sort(key=itemgetter(0, 1), reverse=True)
    is_same, common = older[0][0]
    # For another graph, code is a better measure than components: compare the code of near ones.
    least = is_same, common if is_same else common - 2
    near = [each for alike, _, each in older if alike >= least]
    return max(map(complete, near[:_COMPARED]), key=nearness)


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


class StoredEntries:
    """Find neighbors among the entries of the remote, or of the local tier, by their headers.

    Reads happen when they are needed and stop at the first failure, which is in :attr:`problem`.
    Damaged and untrusted entries are skipped.
    """

    def __init__(self, where: str, open_place: Callable[[], EntryLocation] | None) -> None:
        self._where = where
        self._open = open_place
        self._place: EntryLocation | None = None
        self._deadline = 0.0
        self._names: dict[str, str] = {}
        self._parts: dict[str, Mapping[str, Mapping[str, str]]] = {}
        self.problem = ""

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
        if name not in self._parts and not self.problem:
            self._parts[name] = self._wait(self._read(self._place, name)) or {}
        return replace(neighbor, record=replace(record, parts=self._parts.get(name, {})))

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """Return the result, or None with :attr:`problem` set if it fails or times out."""
        try:
            return background().wait(work, max(0.0, self._deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            self.problem = f"it was not completely read within {_TIMEOUT_S:g} s"
        except S3CacheError as exc:
            self.problem = str(exc)
        return None

    async def _look(self, place: EntryLocation, found: list[Neighbor]) -> None:
        infos: list[ObjectInfo] = []
        async for info in place.store.list(entries.NAMES):
            infos.append(info)
            if len(infos) == _MAX_NAMES:
                break
        self._names.update((entries.key_of(info.key), info.key) for info in infos)

        async def read(info: ObjectInfo) -> None:
            with contextlib.suppress(CorruptError, UntrustedError):
                head = await read_head(place.store, info.key, place.policy.check)
                if head is not None and (record := _record_of(head.header)):
                    found.append(Neighbor(record, self._where))

        await concurrently(read, heapq.nlargest(_MAX_HEADERS, infos, key=attrgetter("modified")))

    async def _read(self, place: EntryLocation, name: str) -> Mapping[str, Mapping[str, str]]:
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
    created = header.created_ns / 1e9
    record = Record(header.kind, "hit", header.key, time=created, components=components)
    return record if components else None
