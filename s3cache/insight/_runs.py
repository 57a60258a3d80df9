"""Find the recorded runs that a user names."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from s3cache.errors import ConfigError
from s3cache.records import Run, in_jobs, read_head, read_run, run_names
from s3cache.settings import Settings

# The latest runs: a miss is compared with their lookups.
_READ_AT_MOST = 16
# Programs that an error names, where the one that was asked for is not there.
_NAMED_AT_MOST = 5


class Runs:
    """The runs that processes of this machine have recorded, and the one in this process's memory.

    Args:
        settings: say where the records are.
        with_this_process: whether its own lookups come first.
    """

    def __init__(self, settings: Settings, *, with_this_process: bool) -> None:
        self._root = settings.local_dir
        self._places: dict[str, str] = {}
        for place in filter(None, (settings.local_dir, settings.spare_local_dir)):
            try:
                self._places.update((name, place) for name in run_names(place))
            except (OSError, ConfigError):
                continue
        self._names = sorted(self._places, reverse=True)
        self._here = _of_this_process() if with_this_process else None

    @functools.cached_property
    def latest(self) -> list[Run]:
        """Return the latest runs, that of this process first."""
        here = [] if self._here is None else [self._here]
        names = [name for name in self._names if self._here is None or name != self._here.name]
        return [*here, *self._read(names[: _READ_AT_MOST - len(here)])]

    def job(self, name: str = "", script: str = "", module: str = "") -> list[Run]:
        """Return the last run of that name or program, with the others of its job.

        Args:
            name: the beginning of the run's name.

        Raises:
            ConfigError: there is none, or ``script`` is the end of several paths.
        """
        is_program = script or module
        chosen = self._of_program(script, module) if is_program else self._named(name)
        if chosen.job and chosen is not self._here:
            for job in in_jobs(self._heads):
                if any(each.name == chosen.name for each in job):
                    return list(self._read(each.name for each in job))
        return [chosen]

    def has_program(self, script: str) -> bool:
        """Return whether there is a run of a script."""
        return any(map(_by_script(script), self._heads))

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
        found = [head for head in self._heads if is_meant(head)]
        what = f"module {module}" if module else f"script {script}"
        if len({head.file for head in found if head.file}) > 1:
            problem = f"is the end of several: {_programs(found)}"
            raise ConfigError(what, problem, "give more of its path")
        for run in self._read(head.name for head in found):
            return run
        of = f"-m {module}" if module else script
        raise ConfigError(
            what,
            f"no run of it is on record in {self._root}, only of {_programs(self._heads)}",
            f"s3cache run {of} leaves one; s3cache check {of} says what of it can be cached",
        )

    @functools.cached_property
    def _heads(self) -> list[Run]:
        return list(self._read(self._names, read_head))

    def _read(
        self, names: Iterable[str], read: Callable[[str, str], Run] = read_run
    ) -> Iterator[Run]:
        for name in names:
            try:
                yield read(self._places[name], name)
            except (OSError, ConfigError):
                continue  # it was removed in the meantime


def meaning(word: str) -> dict[str, str]:
    """Return ``word`` as an argument of :func:`explain`: a key, a script, or nothing.

    A path at which something lies that Python runs is a script, and so is what looks like one.
    """
    settings, _ = Settings.load()
    runs = Runs(settings, with_this_process=False)
    if any(each.key.startswith(word) for run in runs.latest for each in run.records):
        return {"key": word}
    is_path = os.sep in word or word.endswith((".py", ".pyc")) or bool(_paths_at(word))
    return {"script": word} if is_path or runs.has_program(word) else {}


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
    return ", ".join([*names][:_NAMED_AT_MOST]) or "nothing"
