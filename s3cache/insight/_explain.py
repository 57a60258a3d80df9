"""Why lookups missed or were bypassed, from the records of this machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from s3cache._pages import footer
from s3cache._words import code, printable, table, text
from s3cache.errors import ConfigError
from s3cache.graph import cached_at
from s3cache.insight._differences import Difference, KeyDescription, differences
from s3cache.insight._nearest import EntrySource, Neighbor, nearest
from s3cache.insight._runs import Runs, url_of
from s3cache.manage import Place, open_place
from s3cache.records import Record, Run, folded, ranks_in_words
from s3cache.settings import Settings
from s3cache.stats import Reason

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from s3cache.settings import Options

__all__ = ["Explained", "Explanation", "explain"]

_REASONS = {str(reason): reason.text for reason in Reason}
# Of the table that a notebook shows.
_COLUMNS = ("outcome", "where", "why", "what differs")


@dataclass(frozen=True)
class Explanation:
    """Why one lookup came to what it came to.

    Attributes:
        record: the lookup.
        why: in a line.
        entry: the key of the entry that is nearest, if one is known of.
        known_from: where that is known from.
        differences: what its key differs in, that first which has not followed from another.
        processes: of a job of several, those that it is of: ``ranks 0-7``.
        times: how many lookups that are.
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
        """What ``s3cache explain CODE`` says more of: nothing where the differences say it all."""
        if self.entry or self.record.outcome == "hit":
            return ()
        return tuple(self.record.reason.split())

    def as_dict(self) -> dict[str, object]:
        """The explanation as plain data."""
        record = self.record
        return {
            "level": record.level,
            "outcome": record.outcome,
            "key": record.key,
            "reason": record.reason,
            "why": self.why,
            "time": record.time,
            "elapsed_s": record.elapsed_s,
            "where": list(record.where) if record.where else None,
            "processes": self.processes,
            "times": self.times,
            "nearest": {"key": self.entry, "known_from": self.known_from} if self.entry else None,
            "differences": [each.as_dict() for each in self.differences],
            "rejected": list(record.rejected),
            "reasons": [dict(each) for each in record.reasons],
        }

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """What IPython shows at a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return table("", _COLUMNS, [self.cells()])

    def cells(self) -> list[str]:
        """What a row of a table says of it, in HTML: outcome, place, and what it is due to."""
        record = self.record
        where = "{}:{} in {}".format(*record.where) if record.where else "an unknown place"
        parts = [text(line) for line in record.rejected]
        for reason in record.reasons:
            parts.append(text(f"{reason.get('message', '')} ({reason.get('code', '')})"))
            parts += filter(None, (code(reason.get("line", "")), code(reason.get("fix", ""))))
        for each in self.differences:
            parts.append(text(f"{each.text}{' (follows)' if each.follows else ''}"))
            parts += filter(None, [code(each.diff)])
        nearest = f"nearest: {self.entry[:17]} ({self.known_from})" if self.entry else ""
        return [
            text(f"{record.outcome}: {record.reason}\n{self.processes}".strip()),
            text(f"{where}\n{record.key[:17]}".strip()),
            text(f"{self.why}\n{nearest}".strip()),
            "".join(each if each.startswith("<pre") else f"<div>{each}</div>" for each in parts),
        ]

    def __str__(self) -> str:
        return "\n".join(map(printable, self._lines()))

    def _lines(self) -> Iterator[str]:
        record = self.record
        what = {"aot": "graph", "fx": "half of a graph"}.get(record.level, record.level)
        name = f" {record.key[:17]}" if record.key else ""
        where = "{}:{} in {}".format(*record.where) if record.where else "an unknown place"
        of = f" ({self.processes})" if self.processes else ""
        yield f"{record.outcome}: {what}{name} at {where}{of}"
        yield f"  {record.reason}: {self.why}"
        for number, lack in enumerate(record.rejected, 1):
            yield f"  entry {number} under this key: {lack}"
        for reason in record.reasons:
            node = ".".join(filter(None, (reason.get("module"), reason.get("node"))))
            at = f"{node}: " if node else ""
            yield f"  {at}{reason.get('message', '')} ({reason.get('code', '')})"
            if line := reason.get("line"):
                yield f"    {line}"
            if fix := reason.get("fix"):
                yield f"    fix: {fix}"
        if self.entry:
            yield f"  nearest: {self.entry[:17]} ({self.known_from}), which differs in"
        for each in self.differences:
            yield f"    {each.text}{' (follows)' if each.follows else ''}"
            yield from (f"      {line}" for line in each.diff.splitlines())


@dataclass(frozen=True)
class Explained:
    """A run of one process, or of all of a job, and each lookup that did not hit, explained.

    Attributes:
        run: its name, which ``--run`` takes, or the first one's; ``""`` where a key was asked for.
        program: the script.
        processes: of a job of several, in words: ``ranks 0-7``.
        hits: how many lookups hit.
        explanations: of the others, the oldest first.
        complete: whether all its lookups were recorded.
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
        """All of it as plain data."""
        return {
            "run": self.run,
            "program": self.program,
            "processes": self.processes,
            "hits": self.hits,
            "complete": self.complete,
            "unasked": self.unasked,
            "explanations": [each.as_dict() for each in self.explanations],
        }

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        """What IPython shows at a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        first, *notes = self._lines()
        return table(". ".join([first, *notes]), _COLUMNS, [e.cells() for e in self.explanations])

    def __str__(self) -> str:
        first, *notes = self._lines()
        ours = (printable(first), *map(str, self.explanations), *map(printable, notes))
        return "\n".join(ours)

    def _lines(self) -> Iterator[str]:
        counts = [
            f"{sum(e.times for e in self.explanations if e.record.outcome == outcome)} {words}"
            for outcome, words in (("miss", "missed"), ("bypass", "bypassed"))
        ]
        ranks = f", {self.processes}" if self.processes else ""
        of = f"run {self.run} of {self.program}{ranks}: " if self.run else ""
        yield f"{of}{self.hits} hit, {', '.join(counts)}"
        if not self.complete:
            yield "there were more lookups than are recorded of one process"
        if self.unasked:
            yield f"the remote could not be read: {self.unasked}"
        if more := footer(code for each in self.explanations for code in each.codes):
            yield more


def explain(
    run: str | None = None,
    *,
    key: str | None = None,
    script: str | None = None,
    module: str | None = None,
    url: str | None = None,
    remote: bool = True,
    **options: Unpack[Options],
) -> Explained:
    """Explain why lookups missed or were bypassed: in this process, else in the last recorded one.

    Each miss is compared with the nearest entry among those that this machine has looked up, the
    256 last used ones in its local tier, and the 256 latest of the first 8,000 in the remote.
    torch is not needed. The processes of one job on this machine are explained together.

    Args:
        run: the name of a run, or the beginning of one.
        key: what was looked up, or the beginning of it: the last lookup of it that did not hit.
        script: the program whose last run is meant: its path, or the end of it where nothing lies
            at that path.
        module: the same of a program that was run by ``-m``.
        url: of the remote, where neither this process nor the environment names it.
        remote: False to leave the remote alone.
        options: settings that say where records and the remote are, such as ``local_dir``.

    Raises:
        ConfigError: there is no such run, key or program, nothing is recorded, or two are given.
    """
    if sum(each is not None for each in (run, key, script, module)) > 1:
        raise ConfigError(
            "what to explain", "is said twice", "give a run, a key, a script or a module"
        )
    settings, _ = Settings.load(url, **options)
    is_here = run is None and script is None and module is None and not options
    runs = Runs(settings, with_this_process=is_here)
    remote_url = url_of(settings) if remote else None

    def tier() -> Place:
        return open_place(in_tier=True, of_all=True, **options)

    has_tier = settings.local and os.path.isdir(settings.local_dir)
    local = EntrySource("the local tier", tier if has_tier else None)
    shared = EntrySource(
        "the remote",
        None if remote_url is None else functools.partial(open_place, remote_url, **options),
    )
    try:
        if key is not None:
            return _of_key(
                key, runs.latest, _NeighborSources(_recorded(runs.latest), local, shared)
            )
        if script is None and module is None:
            chosen = runs.named(run or "")
        else:
            chosen = runs.of_program(script or "", module or "")
        job = runs.job_of(chosen)
        recorded = _recorded({each.name: each for each in (*job, *runs.latest)}.values())
        return _of_job(job, _NeighborSources(recorded, local, shared))
    finally:
        local.close()
        shared.close()


def _of_job(job: Sequence[Run], sources: _NeighborSources) -> Explained:
    explanations = tuple(
        replace(
            _explained(each.record, sources),
            processes=ranks_in_words(each.runs) if len(job) > 1 else "",
            times=len(each.runs),
        )
        for each in folded(job)
        # Halves of a graph that missed as a whole miss with it.
        if each.record.outcome != "hit" and not each.record.of_whole
    )
    return Explained(
        run=job[0].name,
        program=job[0].program,
        hits=sum(record.outcome == "hit" for each in job for record in each.records),
        explanations=explanations,
        complete=all(each.complete for each in job),
        unasked=sources.remote.problem,
        processes=ranks_in_words(job) if len(job) > 1 else "",
    )


def _of_key(key: str, runs: Iterable[Run], sources: _NeighborSources) -> Explained:
    records = [record for run in runs for record in run.records if record.key.startswith(key)]
    last = max(records, key=lambda each: (each.outcome != "hit", each.time), default=None)
    if last is None or not key:
        raise ConfigError(
            f"key {key!r}",
            "is not in the records of this machine",
            "s3cache ls --key finds entries",
        )
    hits = sum(each.outcome == "hit" for each in records)
    explanations = () if last.outcome == "hit" else (_explained(last, sources),)
    return Explained("", "", hits, explanations, unasked=sources.remote.problem)


def _explained(record: Record, sources: _NeighborSources) -> Explanation:
    if record.outcome == "bypass":
        at = cached_at(reason.get("code", "") for reason in record.reasons)
        return Explanation(record, at if record.level == "aot" else "cannot be cached")
    why = _REASONS.get(record.reason, "")
    if record.reason != "absent" or not record.components:
        return Explanation(record, why)
    found = sources.nearest(record)
    if found is None:
        return Explanation(record, f"{why}; there is no entry to compare it with")
    wanted = KeyDescription(record.components, record.parts)
    differing = tuple(differences(found.described, wanted))
    return Explanation(record, why, found.key, found.where, differing)


# -- what lookups are compared with


@dataclass(frozen=True)
class _NeighborSources:
    """Records of this machine, its local tier and the remote, in the order of preference."""

    recorded: Sequence[Neighbor]
    local: EntrySource
    remote: EntrySource

    def nearest(self, missed: Record) -> Neighbor | None:
        found: dict[tuple[str, str], Neighbor] = {}
        for each in (*self.recorded, *self.local.neighbors, *self.remote.neighbors):
            found.setdefault((each.level, each.key), each)
        return nearest(missed, found.values(), self._complete)

    def _complete(self, neighbor: Neighbor) -> Neighbor:
        return self.remote.complete(self.local.complete(neighbor))


def _recorded(runs: Iterable[Run]) -> list[Neighbor]:
    """Return what was looked up; the parts of a hit are those of the miss that led to it."""
    found: dict[tuple[str, str], Neighbor] = {}
    for run in runs:
        for record in run.records:
            if not record.components:
                continue
            described = KeyDescription(record.components, record.parts)
            where = f"run {run.name}" if run.name else "this process"
            new = Neighbor(record.key, record.level, described, where, record.time)
            old = found.get((record.level, record.key))
            if old is not None:
                described = replace(described, parts=old.described.parts or record.parts)
                new = replace(old, described=described, time=min(old.time, record.time))
            found[record.level, record.key] = new
    return list(found.values())
