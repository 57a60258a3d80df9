"""Which runs are meant, of those that this machine has on record."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from s3cache.errors import ConfigError
from s3cache.records import Run, in_jobs, read_head, read_run, run_names
from s3cache.settings import Settings

__all__ = ["Runs", "meaning", "url_of"]

# So many runs are read, the latest ones, to find what is nearest.
_READ_AT_MOST = 16
# So many programs are named where the one that is asked for is not there.
_NAMED_AT_MOST = 5


class Runs:
    """What processes of this machine have recorded, and this one holds in memory.

    Args:
        settings: say where the records are.
        with_this_process: what it holds comes first.
    """

    def __init__(self, settings: Settings, *, with_this_process: bool) -> None:
        self._root = settings.local_dir
        places = [each for each in (settings.local_dir, settings.spare_local_dir) if each]
        self._stored = dict(sorted(_stored(places), reverse=True))
        self._here = _of_this_process() if with_this_process else None

    @functools.cached_property
    def latest(self) -> list[Run]:
        """The latest runs, that of this process first."""
        here = self._here
        runs = [] if here is None else [here]
        for name in self._stored:
            if len(runs) >= _READ_AT_MOST:
                break
            if (here is None or name != here.name) and (run := self._read(name)) is not None:
                runs.append(run)
        return runs

    def named(self, beginning: str) -> Run:
        """The latest one whose name begins so.

        Raises:
            ConfigError: there is none.
        """
        chosen = next((each for each in self.latest if each.name.startswith(beginning)), None)
        if chosen is None and beginning:
            names = (name for name in self._stored if name.startswith(beginning))
            chosen = next(filter(None, map(self._read, names)), None)
        if chosen is None:
            raise ConfigError(
                f"run {beginning}" if beginning else "records",
                "there is none of that name" if beginning else f"there are none in {self._root}",
                "run a program that compiles with s3cache on (and with record and local not off)",
            )
        return chosen

    def of_program(self, script: str, module: str) -> Run:
        """The latest one of a script, or of a module.

        Raises:
            ConfigError: there is none, or ``script`` is the end of several paths.
        """
        is_meant = _by_module(module) if module else _by_script(script)
        heads = self._heads
        found = [head for head in heads if is_meant(head)]
        programs = dict.fromkeys(_program(head) for head in found)
        what = f"module {module}" if module else f"script {script}"
        if len({head.file for head in found if head.file}) > 1:
            several = ", ".join(list(programs)[:_NAMED_AT_MOST])
            raise ConfigError(what, f"is the end of several: {several}", "give more of its path")
        chosen = next(filter(None, (self._read(head.name) for head in found)), None)
        if chosen is None:
            of = f"-m {module}" if module else script
            raise ConfigError(
                what,
                f"no run of it is on record in {self._root}{_there_are(heads)}",
                f"s3cache run {of} leaves one; s3cache check {of} says what of it can be cached",
            )
        return chosen

    def has_program(self, script: str) -> bool:
        """Whether there is a run of it."""
        return any(map(_by_script(script), self._heads))

    def job_of(self, chosen: Run) -> list[Run]:
        """All runs of the job that ``chosen`` is of, with their lookups."""
        if not chosen.job or chosen is self._here:
            return [chosen]
        for job in in_jobs(self._heads):
            if any(each.name == chosen.name for each in job):
                return [run for each in job if (run := self._read(each.name)) is not None]
        return [chosen]

    @functools.cached_property
    def _heads(self) -> list[Run]:
        heads = (self._read(name, read_head) for name in self._stored)
        return [head for head in heads if head is not None]

    def _read(self, name: str, read: Callable[[str, str], Run] = read_run) -> Run | None:
        try:
            return read(self._stored[name], name)
        except (OSError, ConfigError):
            return None  # it has gone meanwhile


def meaning(word: str) -> dict[str, str]:
    """What :func:`explain` takes ``word`` as: a key before a script; nothing where it is neither.

    A path at which something lies that Python runs is a script, and so is what looks like one.
    """
    settings, _ = Settings.load()
    runs = Runs(settings, with_this_process=False)
    if any(each.key.startswith(word) for run in runs.latest for each in run.records):
        return {"key": word}
    is_path = os.sep in word or word.endswith((".py", ".pyc")) or bool(_paths_at(word))
    return {"script": word} if is_path or runs.has_program(word) else {}


def url_of(settings: Settings) -> str | None:
    """The remote that settings name, else that of the cache of this process."""
    caches = sys.modules.get("s3cache.cache")
    cache = None if caches is None else caches.latest()
    url: str | None = settings.url or (None if cache is None else cache.settings.url)
    return url


# -- programs


def _by_script(script: str) -> Callable[[Run], bool]:
    paths = _paths_at(script)
    plain = os.path.normpath(script)
    ends = (plain, os.path.join(plain, "__main__.py"))

    def is_meant(run: Run) -> bool:
        file = run.file or os.path.normpath(run.program)
        if os.path.isabs(file):
            return file in paths if paths else any(_ends_with(file, end) for end in ends)
        # An older record has what the program was called by, from wherever that was.
        return any(_ends_with(path, file) for path in paths or ends)

    return is_meant


def _by_module(module: str) -> Callable[[Run], bool]:
    names = (module, f"{module}.__main__")
    path = module.replace(".", os.sep)
    ends = (f"{path}.py", os.path.join(path, "__main__.py"))

    def is_meant(run: Run) -> bool:
        if run.file:
            return run.module in names
        return any(_ends_with(run.program, end) for end in ends)

    return is_meant


def _paths_at(script: str) -> Sequence[str]:
    """What Python runs that lies at a path: a file, or what is in a directory or an archive."""
    path = os.path.realpath(script)
    inside = os.path.join(path, "__main__.py")
    if os.path.isfile(path) or os.path.isfile(inside):
        return path, inside
    return ()


def _ends_with(path: str, end: str) -> bool:
    return path == end or path.endswith(os.sep + end)


def _program(run: Run) -> str:
    return run.file or run.program


def _there_are(heads: Sequence[Run]) -> str:
    programs = [each for each in dict.fromkeys(map(_program, heads)) if each]
    if not programs:
        return ", nor any other"
    more = len(programs) - _NAMED_AT_MOST
    others = f" and {more} more" if more > 0 else ""
    return f", only of {', '.join(programs[:_NAMED_AT_MOST])}{others}"


# -- what is there


def _stored(places: Sequence[str]) -> Iterator[tuple[str, str]]:
    for place in places:
        try:
            yield from ((name, place) for name in run_names(place))
        except (OSError, ConfigError):
            continue


def _of_this_process() -> Run | None:
    """What is held in memory, if a cache was enabled here and has looked something up."""
    caches = sys.modules.get("s3cache.cache")
    run: Run | None = None if caches is None else caches.recorded()
    if run is None or not run.records:
        return None
    return replace(run, program=os.path.basename(sys.argv[0]) if sys.argv else "")
