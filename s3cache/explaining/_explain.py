"""Why lookups missed or were bypassed, from the records of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from s3cache._notebooks import code, table, text
from s3cache._pages import footer
from s3cache._words import printable
from s3cache.errors import ConfigError
from s3cache.explaining._differences import Described, Difference, differences
from s3cache.explaining._hinted import Hinted
from s3cache.explaining._nearest import Kept, Known, nearest
from s3cache.explaining._runs import Runs, url_of
from s3cache.records import Record, Run, folded, ranks_in_words
from s3cache.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from s3cache.settings import Options

__all__ = ["Explained", "Explanation", "explain"]

_REASONS = {
    "absent": "nobody has saved it under this key",
    "guard": "there are entries under this key, whose guards on sizes or memory do not hold here",
    "corrupt": "what was there was damaged or could not be used, and was set aside",
    "untrusted": "what was there is signed by nobody who is trusted here",
    "timeout": "the remote did not answer within lookup_timeout_s",
    "unavailable": "the store could not be reached",
    "denied": "credentials are missing, or not allowed to read",
    "full": "there was no room",
    "machine": "this machine had no room, memory or descriptors for it",
    "device": "the driver of the accelerator would not load its kernels",
    "ranks": "another rank of the job missed, and all compile together",
    "disabled": "the mode does not look anything up",
    "forced": "recache=True asks to compile anew",
    "error": "s3cache made a mistake: its log has more",
}


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
        told = [text(line) for line in record.rejected]
        for reason in record.reasons:
            told.append(text(f"{reason.get('message', '')} ({reason.get('code', '')})"))
            told += filter(None, (code(reason.get("line", "")), code(reason.get("fix", ""))))
        for each in self.differences:
            told.append(text(f"{each.text}{' (follows)' if each.follows else ''}"))
            told += filter(None, [code(each.diff)])
        nearest = f"nearest: {self.entry[:17]} ({self.known_from})" if self.entry else ""
        return [
            text(f"{record.outcome}: {record.reason}\n{self.processes}".strip()),
            text(f"{where}\n{record.key[:17]}".strip()),
            text(f"{self.why}\n{nearest}".strip()),
            "".join(each if each.startswith("<pre") else f"<div>{each}</div>" for each in told),
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
        unasked: why the remote could not be asked, if so.
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
            yield f"the remote could not be asked: {self.unasked}"
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
    """Why lookups missed or were bypassed: those of this process, else of the last that recorded.

    For each the nearest entry that this machine has looked up before or has in its local tier (of
    the 256 that it used last), or that hints in the remote lead to, and what its key differs in.
    What hints say is signed by nobody. torch is not needed. Of a job of several processes on this
    machine all are explained together.

    Args:
        run: the name of a run, or the beginning of one.
        key: what was looked up, or the beginning of it: the last lookup of it that did not hit.
        script: the program whose last run is meant: its path, or the end of it where nothing lies
            at that path.
        module: the same of a program that was run by ``-m``.
        url: of the remote, where neither this process nor the environment names it.
        remote: whether to ask it, if there is one: a few small requests for each miss.
        options: settings that say where records and the remote are, such as ``local_dir``.

    Raises:
        ConfigError: there is no such run, key or program, nothing is recorded, or two are given.
    """
    if sum(each is not None for each in (run, key, script, module)) > 1:
        raise ConfigError(
            "what to explain", "is said twice", "give a run, a key, a script or a module"
        )
    settings, _ = Settings.load(url, **options)
    hinted = Hinted(options, url_of(settings) if remote else None)
    is_here = run is None and script is None and module is None and not options
    runs = Runs(settings, with_this_process=is_here)
    kept = Kept(settings, options)
    try:
        if key is not None:
            return _of_key(key, runs.latest, _Around(_known(runs.latest), kept, hinted))
        if script is None and module is None:
            chosen = runs.named(run or "")
        else:
            chosen = runs.of_program(script or "", module or "")
        job = runs.job_of(chosen)
        known = _known({each.name: each for each in (*job, *runs.latest)}.values())
        return _of_job(job, _Around(known, kept, hinted))
    finally:
        kept.close()


def _of_job(job: Sequence[Run], around: _Around) -> Explained:
    explanations = tuple(
        replace(
            _explained(each.record, around),
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
        unasked=around.hinted.problem,
        processes=ranks_in_words(job) if len(job) > 1 else "",
    )


def _of_key(key: str, runs: Iterable[Run], around: _Around) -> Explained:
    records = [record for run in runs for record in run.records if record.key.startswith(key)]
    last = max(records, key=lambda each: (each.outcome != "hit", each.time), default=None)
    if last is None or not key:
        raise ConfigError(
            f"key {key!r}",
            "is not in the records of this machine",
            "s3cache ls --key finds entries",
        )
    hits = sum(each.outcome == "hit" for each in records)
    explanations = () if last.outcome == "hit" else (_explained(last, around),)
    return Explained("", "", hits, explanations, unasked=around.hinted.problem)


def _explained(record: Record, around: _Around) -> Explanation:
    if record.outcome == "bypass":
        return Explanation(record, "it cannot be cached as it is")
    why = _REASONS.get(record.reason, "")
    if record.reason != "absent" or not record.components:
        return Explanation(record, why)
    found = around.nearest(record)
    if found is None:
        return Explanation(record, f"{why}; there is no entry to compare it with")
    wanted = Described(record.components, record.parts)
    differing = tuple(differences(found.described, wanted))
    return Explanation(record, why, found.key, found.where, differing)


# -- what there is to compare with


@dataclass(frozen=True)
class _Around:
    """What lookups are compared with: what is on record, in the local tier and in the remote."""

    known: Sequence[Known]
    kept: Kept
    hinted: Hinted

    def nearest(self, missed: Record) -> Known | None:
        recorded = {(each.level, each.key) for each in self.known}
        candidates = [*self.known, *self.kept.known(recorded), *self.hinted.near(missed)]
        return nearest(missed, candidates, self.kept.complete)


def _known(runs: Iterable[Run]) -> list[Known]:
    """What was looked up before; of a hit, the miss that led to it says what its parts are."""
    found: dict[tuple[str, str], Known] = {}
    for run in runs:
        for record in run.records:
            if not record.components:
                continue
            described = Described(record.components, record.parts)
            where = f"run {run.name}" if run.name else "this process"
            new = Known(record.key, record.level, described, where, record.time)
            old = found.get((record.level, record.key))
            if old is not None:
                parts = old.described.parts or record.parts
                described = replace(described, parts=parts)
                new = replace(old, described=described, time=min(old.time, record.time))
            found[record.level, record.key] = new
    return list(found.values())
