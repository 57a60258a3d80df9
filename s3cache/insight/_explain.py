"""Explain why lookups missed or were bypassed, from the records of this machine."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from s3cache.errors import ConfigError
from s3cache.graph import cached_at
from s3cache.insight._differences import (
    Difference,
    EntrySource,
    Neighbor,
    differences,
    nearest,
    recorded_neighbors,
)
from s3cache.manage import open_place
from s3cache.records import (
    Record,
    Run,
    folded,
    in_jobs,
    ranks_in_words,
    read_head,
    read_run,
    run_names,
)
from s3cache.settings import Settings
from s3cache.stats import Reason
from s3cache.util.text import footer, printable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from s3cache.settings import Options

_REASONS = {str(reason): reason.text for reason in Reason}
# The latest runs: a miss is compared with their lookups.
_MAX_RUNS = 16
# Programs that an error names, where the one that was asked for is not there.
_MAX_NAMED = 5
_GRAPHS = {"aot": "graph", "fx": "FX graph"}


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why one lookup ended as it did; as text, it says so in words.

    Attributes:
        record: the lookup.
        why: in a line.
        entry: the key of the nearest entry, if one is known.
        known_from: where that entry is known from.
        differences: between the entry's key and the lookup's; those that follow from others last.
        processes: of a job of several, the processes of this lookup: ``ranks 0-7``.
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
        """Return the codes to read on about: none where the differences say it all."""
        return () if self.entry else tuple(self.record.reason.split())

    @property
    def line(self) -> str:
        """Return in one line what differs or was rejected, else why."""
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
        """Return all of it as plain data."""
        return {**vars(self), "explanations": [each.as_dict() for each in self.explanations]}

    def __repr__(self) -> str:
        missed, bypassed = (
            sum(each.times for each in self.explanations if each.record.outcome == outcome)
            for outcome in ("miss", "bypass")
        )
        ranks = f", {self.processes}" if self.processes else ""
        of = f"run {self.run} of {self.program}{ranks}: " if self.run else ""
        notes = [
            "" if self.complete else "there were more lookups than are recorded of one process",
            f"the remote could not be read: {self.unasked}" if self.unasked else "",
            footer(code for each in self.explanations for code in each.codes),
        ]
        head = printable(f"{of}{self.hits} hit, {missed} missed, {bypassed} bypassed")
        shown = map(repr, self.explanations)
        return "\n".join([head, *shown, *map(printable, filter(None, notes))])


def reasons_of(record: Record) -> list[str]:
    """Return the reasons of a bypass, each in a line."""
    parts = ([each.get(name) for name in ("message", "line", "fix")] for each in record.reasons)
    return [". ".join(part.rstrip(".") for part in each if part) for each in parts]


# -- explaining


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
        script: the program to take the last run of: its path, or the end of it where nothing lies
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
    runs = _Runs(settings, with_this_process=is_here)
    job = [] if key is not None else runs.job(run or "", script or "", module or "")
    has_tier = settings.local and os.path.isdir(settings.local_dir)
    tier = functools.partial(open_place, in_tier=True, of_all=True, **options)
    remote_url = _remote_url(settings) if remote else None
    bucket = functools.partial(open_place, remote_url, **options)
    local = EntrySource("the local tier", tier if has_tier else None)
    shared = EntrySource("the remote", bucket if remote_url is not None else None)
    with closing(local), closing(shared):
        known = recorded_neighbors({each.name: each for each in (*job, *runs.latest)}.values())

        def find(missed: Record) -> Neighbor | None:
            """Return the nearest entry: what is recorded goes before the tier and the remote."""
            found: dict[tuple[str, str], Neighbor] = {}
            for each in (*known, *local.neighbors, *shared.neighbors):
                found.setdefault((each.record.level, each.record.key), each)
            return nearest(
                missed, found.values(), lambda each: shared.complete(local.complete(each))
            )

        found = _of_job(job, find) if key is None else _of_key(key, runs.latest, find)
        return replace(found, unasked=shared.problem)


_Find: TypeAlias = Callable[[Record], "Neighbor | None"]


def _remote_url(settings: Settings) -> str | None:
    """Return the remote of the settings, else that of the cache of this process."""
    caches = sys.modules.get("s3cache.cache")
    cache = None if caches is None else caches.current_cache()
    return settings.url or (None if cache is None else cache.settings.url)


def _of_job(job: Sequence[Run], find: _Find) -> Explained:
    is_one = len(job) == 1
    explanations = tuple(
        replace(
            _explained(each.record, find),
            processes="" if is_one else ranks_in_words(each.runs),
            times=len(each.runs),
        )
        for each in folded(job)
        # The FX graphs of a whole graph that missed were looked up because of that.
        if each.record.outcome != "hit" and not each.record.of_whole
    )
    return Explained(
        run=job[0].name,
        program=job[0].program,
        hits=sum(record.outcome == "hit" for each in job for record in each.records),
        explanations=explanations,
        complete=all(each.complete for each in job),
        processes="" if is_one else ranks_in_words(job),
    )


def _of_key(key: str, runs: Iterable[Run], find: _Find) -> Explained:
    records = [record for run in runs for record in run.records if record.key.startswith(key)]
    last = max(records, key=lambda each: (each.outcome != "hit", each.time), default=None)
    if last is None or not key:
        problem = "is not in the records of this machine"
        raise ConfigError(f"key {key!r}", problem, "s3cache ls --key finds entries")
    hits = sum(each.outcome == "hit" for each in records)
    return Explained("", "", hits, () if last.outcome == "hit" else (_explained(last, find),))


def _explained(record: Record, find: _Find) -> Explanation:
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


class _Runs:
    """The recorded runs of this machine, and the one in this process's memory."""

    def __init__(self, settings: Settings, *, with_this_process: bool) -> None:
        self._root = settings.local_dir
        self._places: dict[str, str] = {}
        for place in settings.local_dirs:
            with suppress(OSError, ConfigError):
                self._places.update((name, place) for name in run_names(place))
        self._names = sorted(self._places, reverse=True)
        self._here = _of_this_process() if with_this_process else None

    @functools.cached_property
    def latest(self) -> list[Run]:
        """Return the latest runs, that of this process first."""
        here = [] if self._here is None else [self._here]
        names = [name for name in self._names if self._here is None or name != self._here.name]
        return [*here, *self._read(names[: _MAX_RUNS - len(here)])]

    @functools.cached_property
    def heads(self) -> list[Run]:
        """Return all runs without their lookups, the latest first."""
        return [*self._read(self._names, read_head)]

    def job(self, name: str = "", script: str = "", module: str = "") -> list[Run]:
        """Return the last run with a name that begins so, or of a program, with its job."""
        is_program = script or module
        chosen = self._of_program(script, module) if is_program else self._named(name)
        if chosen.job and chosen is not self._here:
            for job in in_jobs(self.heads):
                if any(each.name == chosen.name for each in job):
                    return [*self._read(each.name for each in job)]
        return [chosen]

    def _named(self, beginning: str) -> Run:
        names = [name for name in self._names if beginning and name.startswith(beginning)]
        for run in (*self.latest, *self._read(names)):
            if run.name.startswith(beginning):
                return run
        problem = "there is none of that name" if beginning else f"there are none in {self._root}"
        fix = "run a program that compiles with s3cache on (and with record and local not off)"
        raise ConfigError(f"run {beginning}" if beginning else "records", problem, fix)

    def _of_program(self, script: str, module: str) -> Run:
        is_meant = _by_module(module) if module else _by_script(script)
        found = [head for head in self.heads if is_meant(head)]
        what = f"module {module}" if module else f"script {script}"
        if len({head.file for head in found if head.file}) > 1:
            problem = f"is the end of several: {_programs(found)}"
            raise ConfigError(what, problem, "give more of its path")
        for run in self._read(head.name for head in found):
            return run
        of = f"-m {module}" if module else script
        problem = f"no run of it is on record in {self._root}, only of {_programs(self.heads)}"
        fix = f"s3cache run {of} leaves one; s3cache check {of} says what of it can be cached"
        raise ConfigError(what, problem, fix)

    def _read(
        self, names: Iterable[str], read: Callable[[str, str], Run] = read_run
    ) -> Iterator[Run]:
        for name in names:
            with suppress(OSError, ConfigError):  # it was removed in the meantime
                yield read(self._places[name], name)


def meaning(word: str) -> dict[str, str]:
    """Return ``word`` as an argument of :func:`explain`: a key, a script, or nothing.

    A path at which something lies that Python runs is a script, and so is what looks like one.
    """
    runs = _Runs(Settings.load()[0], with_this_process=False)
    if any(each.key.startswith(word) for run in runs.latest for each in run.records):
        return {"key": word}
    is_path = os.sep in word or word.endswith((".py", ".pyc")) or bool(_paths_at(word))
    return {"script": word} if is_path or any(map(_by_script(word), runs.heads)) else {}


def _of_this_process() -> Run | None:
    """Return the lookups in memory, if a cache was enabled here and has looked something up."""
    caches = sys.modules.get("s3cache.cache")
    run: Run | None = None if caches is None else caches.recorded()
    if run is None or not run.records:
        return None
    return replace(run, program=os.path.basename(sys.argv[0]) if sys.argv else "")


# -- programs


def _by_script(script: str) -> Callable[[Run], bool]:
    paths = _paths_at(script)
    plain = os.path.normpath(script)
    ends = (os.sep + plain, os.sep + os.path.join(plain, "__main__.py"))
    return lambda run: run.file in paths or (not paths and f"{os.sep}{run.file}".endswith(ends))


def _by_module(module: str) -> Callable[[Run], bool]:
    return lambda run: run.module in (module, f"{module}.__main__")


def _paths_at(script: str) -> tuple[str, ...]:
    """Return the paths that Python would run there: a file, or one in a directory or archive."""
    path = os.path.realpath(script)
    inside = os.path.join(path, "__main__.py")
    return (path, inside) if os.path.isfile(path) or os.path.isfile(inside) else ()


def _programs(runs: Iterable[Run]) -> str:
    names = filter(None, dict.fromkeys(run.file or run.program for run in runs))
    return ", ".join([*names][:_MAX_NAMED]) or "nothing"
