"""Explain why lookups missed or were bypassed, from the records of this machine."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from s3cache.errors import ConfigError
from s3cache.graph import cached_at
from s3cache.insight._differences import (
    Difference,
    Neighbor,
    StoredEntries,
    differences,
    nearest,
    recorded_neighbors,
)
from s3cache.manage import EntryLocation, open_place
from s3cache.records import Record, Run, folded, in_jobs, ranks_in_words, recorded
from s3cache.settings import Settings
from s3cache.stats import Reason
from s3cache.util.text import footer, printable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from s3cache.options import Options

_REASONS = {str(reason): reason.text for reason in Reason}
# A miss is compared with the lookups of this many latest runs.
_MAX_RUNS = 16
_GRAPHS = {"aot": "graph", "fx": "FX graph"}


@dataclass(frozen=True, repr=False)
class Explanation:
    """The explanation of one lookup; ``str`` gives it in words.

    Attributes:
        entry: the key of the nearest entry, if one is known.
        known_from: the source of that entry.
        differences: between the keys of entry and lookup; those that follow from others last.
        processes: in a job of several processes, those with this lookup: ``ranks 0-7``.
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
        found = [each.text for each in self.differences if not each.follows]
        return "; ".join([*self.record.rejected, *found, *reasons_of(self.record)]) or self.why

    def as_dict(self) -> dict[str, object]:
        """Return the explanation as plain data."""
        named = ("level", "outcome", "key", "reason", "time", "elapsed_s", "where", "rejected")
        return {
            **{name: getattr(self.record, name) for name in named},
            "why": self.why,
            "processes": self.processes,
            "times": self.times,
            "nearest": {"key": self.entry, "known_from": self.known_from} if self.entry else None,
            "differences": [each.as_dict() for each in self.differences],
            "reasons": [dict(each) for each in self.record.reasons],
        }

    def __repr__(self) -> str:
        record = self.record
        where = "{}:{} in {}".format(*record.where) if record.where else "an unknown place"
        graph = " ".join(filter(None, (_GRAPHS.get(record.level, record.level), record.key[:17])))
        of = f" ({self.processes})" if self.processes else ""
        lines = [f"{record.outcome}: {graph} at {where}{of}", f"  {record.reason}: {self.why}"]
        for number, why in enumerate(record.rejected, 1):
            lines.append(f"  entry {number} under this key: {why}")
        for reason in record.reasons:
            node = ".".join(filter(None, (reason.get("module"), reason.get("node"))))
            at = f"{node}: " if node else ""
            lines.append(f"  {at}{reason.get('message', '')} ({reason.get('code', '')})")
            fix = f"fix: {reason['fix']}" if reason.get("fix") else ""
            lines += [f"    {each}" for each in (reason.get("line", ""), fix) if each]
        if self.entry:
            which = f"{self.entry[:17]} ({self.known_from})"
            lines.append(f"  nearest: {which}, which differs in")
        for each in self.differences:
            lines.append(f"    {each.text}{' (follows)' if each.follows else ''}")
            lines += [f"      {line}" for line in each.diff.splitlines()]
        return "\n".join(map(printable, lines))


@dataclass(frozen=True, repr=False)
class Explained:
    """The run of a process, or of all processes of a job, with explanations of all non-hits.

    Attributes:
        run: the name of the (first) run.
        processes: in a job of several processes, which: ``ranks 0-7``.
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
        return {**vars(self), "explanations": [each.as_dict() for each in self.explanations]}

    def __repr__(self) -> str:
        missed, bypassed = (
            sum(each.times for each in self.explanations if each.record.outcome == outcome)
            for outcome in ("miss", "bypass")
        )
        ranks = f", {self.processes}" if self.processes else ""
        of = f"run {self.run} of {self.program}{ranks}: "
        notes = [
            "" if self.complete else "there were more lookups than one process records",
            f"the remote could not be read: {self.unasked}" if self.unasked else "",
            footer(code for each in self.explanations for code in each.codes),
        ]
        head = printable(f"{of}{self.hits} hit, {missed} missed, {bypassed} bypassed")
        shown = map(repr, self.explanations)
        return "\n".join([head, *shown, *map(printable, filter(None, notes))])


def reasons_of(record: Record) -> list[str]:
    """Return the reasons of a bypass, one line each."""
    parts = ([each.get(name) for name in ("message", "line", "fix")] for each in record.reasons)
    return [". ".join(part.rstrip(".") for part in each if part) for each in parts]


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
    caches = sys.modules.get("s3cache.cache")
    cache = None if caches is None else caches.current_cache()
    remote_url = settings.url or (None if cache is None else cache.settings.url)
    here = None if what or options else _of_this_process()
    others = recorded(settings.local_dirs, lambda name: here is None or name != here.name)
    latest = [*itertools.islice(others, _MAX_RUNS)]
    job, key = ([here], "") if here is not None else _chosen(settings, latest, what)
    with ExitStack() as stack:

        def place(in_tier: bool) -> EntryLocation:
            return stack.enter_context(open_place(remote_url, in_tier=in_tier, **options))

        tier = StoredEntries("the local tier", partial(place, True) if settings.local else None)
        entries = StoredEntries(
            "the remote", partial(place, False) if remote and remote_url else None
        )
        known = recorded_neighbors({each.name: each for each in (*job, *latest)}.values())

        def find(missed: Record) -> Neighbor | None:
            """Return the nearest entry: from records, else from the local tier and the remote."""
            found: dict[tuple[str, str], Neighbor] = {}
            for each in (*known, *tier.neighbors, *entries.neighbors):
                found.setdefault((each.record.level, each.record.key), each)
            return nearest(missed, found.values(), lambda it: entries.complete(tier.complete(it)))

        lookups = [each for each in folded(job) if each.record.key.startswith(key)]
        ranks = ranks_in_words if len(job) > 1 else lambda _: ""
        explanations = tuple(
            replace(_explained(each.record, find), processes=ranks(each.runs), times=len(each.runs))
            for each in lookups
            # The FX graphs of a whole graph are only looked up because the graph missed.
            if each.record.outcome != "hit"
            and (not each.record.of_whole or each.record.reason == Reason.WAITED)
        )
        return Explained(
            run=job[0].name,
            program=job[0].program,
            hits=sum(len(each.runs) for each in lookups if each.record.outcome == "hit"),
            explanations=explanations,
            complete=all(each.complete for each in job),
            processes=ranks(job),
            unasked=entries.problem,
        )


def _explained(record: Record, find: Callable[[Record], Neighbor | None]) -> Explanation:
    if record.outcome == "bypass":
        at = cached_at(reason.get("code", "") for reason in record.reasons)
        return Explanation(record, at if record.level == "aot" else "cannot be cached")
    why = _REASONS.get(record.reason, "")
    if record.reason != "absent" or not record.components:
        return Explanation(record, why)
    found = find(record)
    if found is None:
        return Explanation(record, f"{why}; there is no entry to compare it with")
    differing = tuple(differences(found.record, record))
    return Explanation(record, why, found.record.key, found.where, differing)


# -- the runs to explain


def _chosen(settings: Settings, latest: Sequence[Run], what: str) -> tuple[list[Run], str]:
    """Return the last recorded run that matches, with its job; and the key, if ``what`` is one."""
    heads = [*recorded(settings.local_dirs, heads=True)]
    keyed = [
        run
        for run in latest
        if any(each.key.startswith(what) for each in run.records if each.outcome != "hit")
    ]
    found = [head for head in heads if head.name.startswith(what)]
    key = what if keyed and not found else ""
    found = found or keyed or [head for head in heads if _is_of(head, what)]
    if not found:
        raise ConfigError(
            f"explain {what}".rstrip(),
            f"no such run, key or program is recorded in {settings.local_dir}",
            "s3cache run PROGRAM makes a record (unless record or local is off)",
        )
    job = next(job for job in in_jobs(heads) if any(each.name == found[0].name for each in job))
    names = {each.name for each in job}
    return in_jobs(recorded(settings.local_dirs, names.__contains__))[0], key


def _is_of(run: Run, program: str) -> bool:
    """Return whether ``program`` is the module of a run, its path, or the end of its path."""
    if program and program in (run.module, run.module.removesuffix(".__main__")):
        return True
    files = (run.file, run.file.removesuffix(f"{os.sep}__main__.py"))
    if os.path.exists(program):
        return os.path.realpath(program) in files
    return any(file.endswith(os.sep + os.path.normpath(program)) for file in files)


def _of_this_process() -> Run | None:
    """Return the lookups in memory, if a cache was enabled here and had a lookup."""
    caches = sys.modules.get("s3cache.cache")
    run: Run | None = None if caches is None else caches.recorded()
    if run is None or not run.records:
        return None
    return replace(run, program=os.path.basename(sys.argv[0]) if sys.argv else "")
