"""Explain why lookups missed or were bypassed, from the records of this machine.

A miss is compared with the nearest entry: the differences between two keys are described in words.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import difflib
import functools
import heapq
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from s3cache import entries, frame
from s3cache.artifact import Artifact
from s3cache.cache import current_cache
from s3cache.errors import ConfigError, CorruptError, S3CacheError, UntrustedError
from s3cache.frame import Header
from s3cache.graph import cached_at
from s3cache.manage import EntryLocation, open_place
from s3cache.records import Record, Run, folded, in_jobs, processes_in_words, recorded
from s3cache.seam import reasons
from s3cache.settings import Settings
from s3cache.store import ObjectInfo, concurrently
from s3cache.tier import background, read_head
from s3cache.util.text import footer, printable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from s3cache.options import Options

_T = TypeVar("_T")

_GRAPH = "gm"  # the component that is the graph itself
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
    own_ways = {"machine.isa": _instructions, _GRAPH: _code, "example_inputs": _inputs}
    # A component without a result from its own function is described like any other.
    described = [
        replace(difference, follows=name in implied)
        for name in differing
        for difference in [*own_ways.get(name, _in_general)(name, old, new)]
        or [*_in_general(name, old, new)]
    ]
    return sorted(described, key=attrgetter("follows"))


def _digest(of: Record, name: str) -> str:
    return of.components.get(name, ("", ""))[0]


def _text(of: Record, name: str) -> str:
    return of.parts.get(name, {}).get("", of.components.get(name, ("", ""))[1])


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
    olds, news = old.parts.get(name, {}), new.parts.get(name, {})
    if name in _OPTIONS:
        olds, news = _with_defaults(olds, news), _with_defaults(news, olds)
    elif "" in olds or "" in news or not (olds or news):
        olds, news = _fields(before), _fields(now)
    differing = [part for part in {**olds, **news} if olds.get(part) != news.get(part)]
    if differing and (olds or not before) and (news or not now):
        for part in differing:
            of = f"{label}: {part}" if " " in label else f"{label}.{part}".rstrip(".")
            yield _arrow(name, of, olds.get(part, ""), news.get(part, ""))
    elif before != now:
        yield _arrow(name, label, before, now)
    else:
        yield Difference(name, f"{label} differs in a part that is not shown: {_short(now)}")


def _arrow(name: str, label: str, old: str, new: str) -> Difference:
    text = f"{label} {_short(old)} → {_short(new)}"
    if all(re.fullmatch(_DIGEST, value.strip("'")) for value in (old or new, new or old)):
        how = "has another definition" if old and new else "is missing" if old else "is new"
        text = f"{label} {how}"
    return Difference(name, text, old, new)


def _short(text: str) -> str:
    return f"{text[:_SHOWN_CHARACTERS]}{'…' * (len(text) > _SHOWN_CHARACTERS)}" or "none"


def _with_defaults(options: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return the values of options, with the defaults of those that only ``others`` set."""
    defaults = {name: text.partition(" → ")[0] for name, text in others.items()}
    values = {name: text.partition(" → ")[2] for name, text in options.items()}
    return dict(sorted({**defaults, **values}.items()))


def _instructions(name: str, old: Record, new: Record) -> Iterator[Difference]:
    before, now = _text(old, name).split(), _text(new, name).split()
    lacks = " ".join(word for word in before if word not in now)
    has = " ".join(word for word in now if word not in before)
    verbs = (("lacks", lacks), ("also has", has))
    if details := ", ".join(f"{verb} {_short(words)}" for verb, words in verbs if words):
        yield Difference(name, f"CPU {details}", lacks, has)


def _code(name: str, old: Record, new: Record) -> Iterator[Difference]:
    before, now = old.parts.get(name, {}).get("code", ""), new.parts.get(name, {}).get("code", "")
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
    before, now = old.parts.get(name, {}), new.parts.get(name, {})
    if not (before and now):
        return
    if len(before) != len(now):
        yield _arrow(name, "inputs:", str(len(before)), str(len(now)))
        return
    # The names of inputs in the program: `[L['x'], L['y']]`.
    names = _pieces(new.parts.get("aot_config", {}).get("aot_autograd_arg_pos_to_source", "")[1:-1])
    called = {str(number): f" ({source})" for number, source in enumerate(names)}
    for number, text in now.items():
        if before.get(number, text) != text:
            label = f"input {number}{called.get(number, '')}:"
            yield from _tensor(name, label, before[number], text)


def _tensor(name: str, label: str, before: str, now: str) -> Iterator[Difference]:
    start = "TensorMetadata("
    olds, news = (
        _fields(text[len(start) : -1]) if text.startswith(start) else {} for text in (before, now)
    )
    if not (olds and news):
        yield _arrow(name, label, before, now)
        return
    differing = [part for part in news if olds.get(part) != news[part]]
    for part in differing:
        if "shape" in differing and part in ("stride", "storage_bytes", "memory_format"):
            continue  # it follows from the shape
        old, new = _plain(olds.get(part, "")), _plain(news[part])
        kind = "" if part in ("shape", "dtype", "device") else f" {part}"
        is_fixed = part == "shape" and not re.search(r"[^\d\s,()]", old + new)
        text = f"{label}{kind} {old} → {new}{', not marked dynamic' if is_fixed else ''}"
        yield Difference(name, text, old, new)


def _plain(text: str) -> str:
    if size := re.fullmatch(r"torch\.Size\(\[(.*)\]\)", text):
        return f"({size[1]},)" if size[1] and "," not in size[1] else f"({size[1]})"
    if device := re.fullmatch(r"device\(type='(\w+)'(?:, index=(\d+))?\)", text):
        return ":".join(filter(None, device.groups()))
    return text.removeprefix("torch.")


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
    return {name: v for name, _, v in pairs} if are_fields else dict(_DIGESTED.findall(text))


# -- the nearest entry among those of this machine and of the remote

_COMPARED = 16  # equally near entries, of which details and code are compared
_COMPARED_CHARACTERS = 20_000
_MAX_NAMES = 8000  # of a listing; a page of S3 has a thousand
_MAX_HEADERS = 256  # of the latest entries: some megabytes
_MAX_WHOLE_BYTES = 64 << 20  # a larger entry is not read whole
_TIMEOUT_S = 20.0  # for all reads of the remote together


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
    latest. Only entries older than the miss count. ``complete`` adds the details of a neighbor's
    components, if they can be read.
    """

    def likeness(old: Record) -> tuple[bool, int]:
        """Return whether the graphs are equal, and how many components are equal."""
        components = missed.components.items()
        common = sum(digest == _digest(old, name) for name, (digest, _) in components)
        return _digest(old, _GRAPH) == _digest(missed, _GRAPH), common

    def nearness(neighbor: Neighbor) -> tuple[object, ...]:
        old, alike = neighbor.record, likeness(neighbor.record)
        texts = [of.parts.get(_GRAPH, {}).get("code", "") for of in (old, missed)]
        codes = [[] if alike[0] else text[:_COMPARED_CHARACTERS].splitlines() for text in texts]
        ratio = difflib.SequenceMatcher(None, codes[0], codes[1], autojunk=False).ratio()
        details = sum(it.component != _GRAPH for it in differences(old, missed))
        return ratio, alike, bool(old.parts), -details, old.time

    older = [
        (likeness(old), old.time, neighbor)
        for neighbor in neighbors
        for old in [neighbor.record]
        if old.kind == missed.kind and old.key != missed.key and old.time < missed.time
    ]
    if not older:
        return None
    older.sort(key=itemgetter(0, 1), reverse=True)
    is_same, common = older[0][0]
    # For another graph, code is a better measure than components: compare the code of near ones.
    least = is_same, common if is_same else common - 2
    near = [neighbor for alike, _, neighbor in older if alike >= least]
    return max(map(complete, near[:_COMPARED]), key=nearness)


def _recorded_neighbors(runs: Iterable[Run]) -> Iterable[Neighbor]:
    """Return the recorded lookups; a hit has the details of the miss that led to it."""
    neighbors: dict[tuple[str, str], Neighbor] = {}
    for run in runs:
        where = f"run {run.name}" if run.name else "this process"
        for record in filter(attrgetter("components"), run.records):
            first = neighbors.setdefault((record.kind, record.key), Neighbor(record, where))
            parts = first.record.parts or record.parts
            both = replace(record, parts=parts, time=min(first.record.time, record.time))
            neighbors[record.kind, record.key] = replace(first, record=both)
    return neighbors.values()


class StoredEntries:
    """Find neighbors among the entries of the remote, or of the local tier, by their headers.

    Reads happen when they are needed and stop at the first failure, which is in :attr:`problem`.
    Damaged and untrusted entries are skipped.
    """

    def __init__(self, where: str, open_place: Callable[[], EntryLocation] | None) -> None:
        self._where, self._open = where, open_place and functools.cache(open_place)
        self._deadline = time.monotonic() + _TIMEOUT_S
        self._names: dict[str, str] = {}
        self._parts: dict[str, Mapping[str, Mapping[str, str]]] = {}
        self.problem = ""

    @functools.cached_property
    def neighbors(self) -> list[Neighbor]:
        """Return the latest entries, without details."""
        latest: list[Neighbor] = []
        self._try(lambda place: self._read_headers(place, latest))
        return latest

    def complete(self, neighbor: Neighbor) -> Neighbor:
        """Return ``neighbor`` with the details of its components, if its entry is here."""
        record = neighbor.record
        name = self._names.get(record.key)
        if record.parts or name is None:
            return neighbor
        if name not in self._parts and not self.problem:
            self._parts[name] = self._try(lambda place: self._read_parts(place, name)) or {}
        return replace(neighbor, record=replace(record, parts=self._parts.get(name, {})))

    def _try(self, work: Callable[[EntryLocation], Coroutine[Any, Any, _T]]) -> _T | None:
        """Return the result, or None with :attr:`problem` set if it fails or times out."""
        if self._open is None:
            return None
        try:
            left_s = max(0.0, self._deadline - time.monotonic())
            return background().wait(work(self._open()), left_s)
        except concurrent.futures.TimeoutError:
            self.problem = f"it was not completely read within {_TIMEOUT_S:g} s"
        except S3CacheError as exc:
            self.problem = str(exc)
        return None

    async def _read_headers(self, place: EntryLocation, neighbors: list[Neighbor]) -> None:
        infos: list[ObjectInfo] = []
        async for info in place.store.list(entries.NAMES):
            infos.append(info)
            if len(infos) == _MAX_NAMES:
                break
        self._names.update((entries.key_of(info.key), info.key) for info in infos)

        async def read(info: ObjectInfo) -> None:
            with contextlib.suppress(CorruptError, UntrustedError):
                head = await read_head(place.store, info.key, place.policy.check)
                if head is not None and (record := _record_of(head.header)).components:
                    neighbors.append(Neighbor(record, self._where))

        await concurrently(read, heapq.nlargest(_MAX_HEADERS, infos, key=attrgetter("modified")))

    async def _read_parts(self, place: EntryLocation, name: str) -> Mapping[str, Mapping[str, str]]:
        data = await place.store.get(name, lambda size: size <= _MAX_WHOLE_BYTES)
        if isinstance(data, (bytes, bytearray, memoryview)):
            with contextlib.suppress(CorruptError, UntrustedError):
                return Artifact.parts_of(frame.decode(data, admit=place.policy.check))
        return {}


def _record_of(header: Header) -> Record:
    """Return an entry as a record; without components if its key is not made of them."""
    pairs = header.meta.get("components")
    components = {
        str(name): (str(pair[0]), str(pair[1]))
        for name, pair in (pairs.items() if isinstance(pairs, Mapping) else ())
        if isinstance(pair, (list, tuple)) and len(pair) == 2
    }
    created = header.created_ns / 1e9
    return Record(header.kind, "hit", header.key, time=created, components=components)


# -- explanations

_REASONS = {str(reason): reason.text for reason in reasons()}
_OF_PARTS = frozenset(str(reason) for reason in reasons() if reason.of_parts)
_MAX_RUNS = 16  # the latest ones, with which a miss is compared
_GRAPHS = {"aot": "graph", "fx": "FX graph"}


@dataclass(frozen=True, repr=False)
class Explanation:
    """The explanation of one lookup; ``str`` gives it in words.

    Attributes:
        entry: the key of the nearest entry, if one is known.
        known_from: the source of that entry.
        differences: between the keys of entry and lookup; those that follow from others last.
        processes: in a job of several processes, those with this lookup.
        times: the number of such lookups.
    """

    record: Record
    why: str
    entry: str = ""
    known_from: str = ""
    differences: tuple[Difference, ...] = ()
    processes: str = ""
    times: int = 1

    @property
    def codes(self) -> tuple[str, ...]:
        """Return the codes to look up in the docs; none if the differences explain the miss."""
        return () if self.entry else tuple(self.record.reason.split())

    @property
    def line(self) -> str:
        """Return the differences or rejections in one line, else the reason."""
        causes = [it.text for it in self.differences if not it.follows]
        return "; ".join([*self.record.rejected, *causes, *reasons_of(self.record)]) or self.why

    def as_dict(self) -> dict[str, object]:
        """Return the explanation as plain data."""
        named = ("kind", "outcome", "key", "reason", "time", "elapsed_s", "where", "rejected")
        return {
            **{name: getattr(self.record, name) for name in named},
            "why": self.why,
            "processes": self.processes,
            "times": self.times,
            "nearest": {"key": self.entry, "known_from": self.known_from} if self.entry else None,
            "differences": [difference.as_dict() for difference in self.differences],
            "reasons": [dict(reason) for reason in self.record.reasons],
        }

    def __repr__(self) -> str:
        record = self.record
        where = "{}:{} in {}".format(*record.where) if record.where else "an unknown place"
        graph = " ".join(filter(None, (_GRAPHS.get(record.kind, record.kind), record.key[:17])))
        of = f" ({self.processes})" if self.processes else ""
        lines = [f"{record.outcome}: {graph} at {where}{of}", f"  {record.reason}: {self.why}"]
        for number, why in enumerate(record.rejected, 1):
            lines.append(f"  entry {number} under this key: {why}")
        for reason in record.reasons:
            node = ".".join(filter(None, (reason.get("module"), reason.get("node"))))
            at = f"{node}: " if node else ""
            lines.append(f"  {at}{reason.get('message', '')} ({reason.get('code', '')})")
            fix = f"fix: {reason['fix']}" if reason.get("fix") else ""
            lines += [f"    {line}" for line in (reason.get("line", ""), fix) if line]
        if self.entry:
            which = f"{self.entry[:17]} ({self.known_from})"
            lines.append(f"  nearest: {which}, which differs in")
        for difference in self.differences:
            lines.append(f"    {difference.text}{' (follows)' if difference.follows else ''}")
            lines += [f"      {line}" for line in difference.diff.splitlines()]
        return "\n".join(map(printable, lines))


@dataclass(frozen=True, repr=False)
class Explained:
    """The run of a process, or of all processes of a job, with explanations of all non-hits.

    Attributes:
        run: the name of the (first) run.
        processes: in a job of several processes, which.
        hits: the number of hits; with a key, of that key.
        explanations: of the other lookups, oldest first.
        complete: whether all lookups were recorded.
        unasked: why the remote could not be read, or not completely.
    """

    run: str
    program: str
    hits: int
    explanations: tuple[Explanation, ...]
    complete: bool = True
    unasked: str = ""
    processes: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return the explanations as plain data."""
        return {**vars(self), "explanations": [lookup.as_dict() for lookup in self.explanations]}

    def __repr__(self) -> str:
        missed, bypassed = (
            sum(lookup.times for lookup in self.explanations if lookup.record.outcome == outcome)
            for outcome in ("miss", "bypass")
        )
        processes = f", {self.processes}" if self.processes else ""
        head = f"run {self.run} of {self.program}{processes}: {self.hits} hit, {missed} missed"
        head += f", {bypassed} bypassed"
        notes = [
            "" if self.complete else "there were more lookups than one process records",
            f"the remote could not be read: {self.unasked}" if self.unasked else "",
            footer(code for lookup in self.explanations for code in lookup.codes),
        ]
        lines = [printable(head), *map(repr, self.explanations), *map(printable, notes)]
        return "\n".join(filter(None, lines))


def reasons_of(record: Record) -> list[str]:
    """Return the reasons of a bypass, one line each."""
    return [
        ". ".join(text.rstrip(".") for n in ("message", "line", "fix") if (text := reason.get(n)))
        for reason in record.reasons
    ]


# -- explaining


def explain(
    what: str = "", *, url: str | None = None, remote: bool = True, **options: Unpack[Options]
) -> Explained:
    """Explain why lookups missed or were bypassed: in this process, else in the last recorded one.

    A miss is compared with the nearest entry. Candidates are the lookups of the last 16 processes
    of this machine, and the 256 latest of the first 8,000 entries in the local tier and in the
    remote. torch is not needed. The processes of a job on this machine are explained together.

    Args:
        what: the name of a run, a key that was looked up, or the beginning of either. A program
            means its last run; give its path, the end of the path, or the name of its module.
        url: the remote, if neither this process nor the environment configures it.
        remote: False to not read the remote.
        options: settings that locate records and the remote, such as ``local_dir``.

    Raises:
        ConfigError: there is no such run, key or program, or nothing is recorded.
    """
    settings, _ = Settings.load(url, **options)
    cache = current_cache()
    remote_url = settings.url or (None if cache is None else cache.settings.url)
    # The lookups in memory, if a cache was enabled here.
    here = None if cache is None or what or options else cache.engine.recorded()
    others = recorded(settings.local_dirs, lambda name: here is None or name != here.name)
    latest = [*itertools.islice(others, _MAX_RUNS)]
    if here is not None and here.records:
        job, key = [replace(here, program=os.path.basename([*sys.argv, ""][0]))], ""
    else:
        job, key = _chosen(settings, latest, what)
    with ExitStack() as stack:

        def stored(where: str, in_tier: bool) -> StoredEntries:
            place = functools.partial(open_place, remote_url, in_tier=in_tier, **options)
            is_there = settings.local if in_tier else remote and remote_url
            return StoredEntries(
                where, (lambda: stack.enter_context(place())) if is_there else None
            )

        tier, far = stored("the local tier", True), stored("the remote", False)
        recent = _recorded_neighbors({run.name: run for run in (*job, *latest)}.values())

        def find(missed: Record) -> Neighbor | None:
            """Return the nearest entry: from records, else from the local tier and the remote."""
            neighbors = (*far.neighbors, *tier.neighbors, *recent)
            by_key = {(it.record.kind, it.record.key): it for it in neighbors}
            return nearest(missed, by_key.values(), lambda it: far.complete(tier.complete(it)))

        lookups = [(record, runs) for record, runs in folded(job) if record.key.startswith(key)]
        in_words = processes_in_words if len(job) > 1 else lambda _: ""
        explanations = tuple(
            replace(_explained(record, find), processes=in_words(runs), times=len(runs))
            for record, runs in lookups
            # The FX graphs of a whole graph are only looked up because the graph missed.
            if record.outcome != "hit" and (not record.of_whole or record.reason in _OF_PARTS)
        )
        return Explained(
            run=job[0].name,
            program=job[0].program,
            hits=sum(len(runs) for record, runs in lookups if record.outcome == "hit"),
            explanations=explanations,
            complete=all(run.complete for run in job),
            processes=in_words(job),
            unasked=far.problem,
        )


def _explained(record: Record, find: Callable[[Record], Neighbor | None]) -> Explanation:
    if record.outcome == "bypass":
        at = cached_at(reason.get("code", "") for reason in record.reasons)
        return Explanation(record, at if record.kind == "aot" else "cannot be cached")
    why = _REASONS.get(record.reason, "")
    if record.reason != "absent" or not record.components:
        return Explanation(record, why)
    if (entry := find(record)) is None:
        return Explanation(record, f"{why}; there is no entry to compare it with")
    differing = tuple(differences(entry.record, record))
    return Explanation(record, why, entry.record.key, entry.where, differing)


# -- the runs to explain


def _chosen(settings: Settings, latest: Sequence[Run], what: str) -> tuple[list[Run], str]:
    """Return the last recorded run that matches, with its job; and the key, if ``what`` is one."""
    heads = [*recorded(settings.local_dirs, heads=True)]
    keyed = [
        run
        for run in latest
        if any(it.key.startswith(what) for it in run.records if it.outcome != "hit")
    ]
    is_path = os.path.exists(what)
    end = os.path.realpath(what) if is_path else os.sep + os.path.normpath(what)

    def is_of_program(run: Run) -> bool:
        """Return whether ``what`` is the module of a run, its path, or the end of its path."""
        files = (run.file, run.file.removesuffix(f"{os.sep}__main__.py"))
        return bool(what) and (
            what in (run.module, run.module.removesuffix(".__main__"))
            or (end in files if is_path else any(file.endswith(end) for file in files))
        )

    runs = [head for head in heads if head.name.startswith(what)]
    key = what if keyed and not runs else ""
    runs = runs or keyed or [*filter(is_of_program, heads)]
    if not runs:
        raise ConfigError(
            f"explain {what}".rstrip(),
            f"no such run, key or program is recorded in {settings.local_dir}",
            "s3cache run PROGRAM makes a record (unless record or local is off)",
        )
    job = next(job for job in in_jobs(heads) if any(run.name == runs[0].name for run in job))
    names = {run.name for run in job}
    return in_jobs(recorded(settings.local_dirs, names.__contains__))[0], key
