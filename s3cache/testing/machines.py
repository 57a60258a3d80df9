"""Machines that have never seen a program, like a fresh node of a fleet or of CI.

As a program, this module runs another program on a machine, and reports on it:
``python -m s3cache.testing.machines REPORT run|module|call PROGRAM ...``.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import pkgutil
import runpy
import shlex
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Any, TypedDict

from s3cache.seam import features
from s3cache.stats import CacheStats
from s3cache.util.text import counted

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PLACES = {
    "HOME": "home",
    "XDG_CACHE_HOME": "home/.cache",
    "TMPDIR": "tmp",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "S3CACHE_LOCAL_DIR": "local",
}
# Variables of the installation, not of the user's history.
_KEPT = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "CC", "CXX"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"),
)
_OUTPUT_LINES = 60


@dataclass(frozen=True)
class Outcome:
    """The outcome of a process on a :class:`Machine`."""

    command: str  # for messages
    exit_code: int | None  # negative for a signal, None after a timeout
    stdout: str
    stderr: str
    result: Any = None  # of the called function, as from JSON
    recorded: CacheStats | None = None  # the counts of the cache, if any; tests want `stats`

    @property
    def stats(self) -> CacheStats:
        """The counts of the cache that the program enabled last, including uploads at its exit.

        Raises AssertionError if it enabled none: a test that expects no misses must not pass then.
        """
        if self.recorded is None:
            raise AssertionError(
                f"{self.command}: there was no cache; does the program enable s3cache, does "
                f"s3cache support this torch, did it leave by os._exit()?\n{_end(self.stderr)}"
            )
        return self.recorded


class ProgramError(AssertionError):
    """A program on a :class:`Machine` failed or timed out; ``outcome`` has its output."""

    def __init__(self, outcome: Outcome, how: str) -> None:
        super().__init__(f"{outcome.command}: {how}\n{_end(outcome.stdout + outcome.stderr)}")
        self.outcome = outcome


def _end(output: str) -> str:
    return "\n".join(output.splitlines()[-_OUTPUT_LINES:])


class How(TypedDict, total=False):
    """How a process runs on a :class:`Machine`."""

    environment: Mapping[str, str]  # variables of this process only
    cwd: str | os.PathLike[str]  # by default that of the test, which is not empty
    timeout_s: float  # after this time, 600, it is killed, with its child processes
    python: str  # the interpreter; it must have s3cache too


class Machine:
    """A directory, and the processes that run on it one after the other.

    Its first process finds an empty home, empty caches, an empty temporary directory and an empty
    local tier. Two machines only share what a test gives both of them, usually the URL of a bucket.
    A second process on a machine finds the files of the first: use this to test a restart on the
    same node. All files of s3cache and torch are in ``root``, which is created. ``environment``
    adds variables to the few that a fresh machine has.
    """

    def __init__(self, root: str | os.PathLike[str], **environment: str) -> None:
        self.root = Path(root).absolute()
        for place in _PLACES.values():
            (self.root / place).mkdir(parents=True, exist_ok=True)
        #: The complete environment of its processes.
        self.environment: dict[str, str] = {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            **{name: str(self.root / place) for name, place in _PLACES.items()},
            "USER": self.root.name,
            # Wait for uploads that a job would leave to the next process, also on a busy machine.
            "S3CACHE_EXIT_TIMEOUT_S": "60",
            "S3CACHE_LOOKUP_TIMEOUT_S": "60",
            **{name: text for feature in features() for name, text in feature.testing},
            **environment,
        }

    def run(self, *command: str | os.PathLike[str], **how: Unpack[How]) -> Outcome:
        """Run ``python *command``: a script or ``-m`` and a module, and arguments for it.

        Raises ProgramError if its exit status is not 0, or if it took too long.
        """
        words = ["run", *(os.fspath(word) for word in command)]
        if words[1:2] == ["-m"]:
            words[:2] = ["module"]
        if len(words) < 2 or words[1].startswith("-"):
            raise ValueError(f"{command} names neither a script nor, after -m, a module")
        return self._execute(words, **how)

    def call(
        self, function: str | Callable[..., object], *arguments: object, **how: Unpack[How]
    ) -> Outcome:
        """Call a function, or ``"module:name"``; the outcome has its result.

        The process imports it again, also from paths that only this process has: it may be in the
        module of a test. Arguments and result must be types of JSON. Raises ProgramError if it
        raised, ended the process or took too long.
        """
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        module, _, name = function.partition(":")
        if not name or "<" in name or module == "__main__":
            raise ValueError(f"{function!r} cannot be imported; give a function of a module")
        variables = {**self.environment, **how.get("environment", {})}
        paths = filter(None, [variables.get("PYTHONPATH", ""), *_project_paths()])
        how["environment"] = {**variables, "PYTHONPATH": os.pathsep.join(paths)}
        return self._execute(["call", function, json.dumps(arguments)], **how)

    def _execute(self, words: list[str], **how: Unpack[How]) -> Outcome:
        timeout_s = how.get("timeout_s", 600)
        python = how.get("python", sys.executable)
        report, *written = (self.root / name for name in ("report.pickle", "stdout", "stderr"))
        report.unlink(missing_ok=True)
        # Files instead of pipes: children of a program may keep pipes open after its end.
        with open(written[0], "wb") as stdout, open(written[1], "wb") as stderr:
            process = subprocess.Popen(  # noqa: S603 - to run a test's program is what it is for
                [python, "-m", "s3cache.testing.machines", str(report), *words],
                env={**self.environment, **how.get("environment", {})},
                cwd=how.get("cwd"),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # so that its child processes can be ended with it
            )
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout_s)
        finally:
            if status is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said, errors = (path.read_text(encoding="utf-8", errors="replace") for path in written)
        result = stats = None
        if report.exists():  # written by the test's own program, as this user
            result, stats = pickle.loads(report.read_bytes())  # noqa: S301
        outcome = Outcome(shlex.join(words), status, said, errors, result, stats)
        if status is None:
            raise ProgramError(outcome, f"still running after {timeout_s} s")
        if status:
            raise ProgramError(outcome, f"exit status {status}")
        return outcome


def _project_paths() -> list[str]:
    """Return the paths of modules that are not installed, such as those that pytest adds."""
    schemes = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [*map(sysconfig.get_path, schemes), *site.getsitepackages()]
    paths = dict.fromkeys(os.path.abspath(path) for path in sys.path if not path.endswith(".zip"))
    return [
        path for path in paths if not any(Path(path).is_relative_to(place) for place in installed)
    ]


# -- comparing two outcomes


def assert_warm_start(
    first: Outcome,
    second: Outcome,
    *,
    same: Callable[[Outcome], object] = lambda it: (
        it.stdout if it.result is None else (it.stdout, it.result)
    ),
) -> None:
    """Assert that ``second`` compiled nothing, and had the same results as ``first``.

    A graph is compiled if both levels of the cache miss. Whole graphs may miss: a forward without a
    backward hits at the second level, which also compiles nothing. Only the process of the machine
    counts, not its child processes.

    ``same`` returns the part of an outcome that must be equal, by default the printed output and
    the result. If a program prints times or paths, remove them there.
    """
    stats = second.stats
    counts = f"first machine: {first.stats.in_words()}\n  second machine: {stats.in_words()}"
    compiled = [
        f"{counted(count, 'graph')} with torch's caches off ({code})"
        for code, count in stats.bypass_reasons.items()
        if code in ("caches-off", "fx-graph-cache-off")  # looked up at neither level
    ]
    missed = stats.fx.misses.items()
    compiled += [f"{counted(count, 'FX graph')} missed ({reason})" for reason, count in missed]
    if stats.fx.bypassed:
        graphs = counted(stats.fx.bypassed, "FX graph")
        compiled.append(f"{graphs} cannot be cached ({', '.join(stats.fx.bypass_reasons)})")
    if compiled:
        raise AssertionError(
            f"{second.command}: compiled on the second machine: {'; '.join(compiled)}\n"
            f"  {counts}\n  `s3cache explain` says why a lookup missed"
        )
    if not (sum(stats.hits.values()) + sum(stats.fx.hits.values())):
        raise AssertionError(
            f"{second.command}: hit nothing, so it compiled nothing; does it call a function of "
            f"torch.compile, with a backend that caches, while s3cache is on?\n  {counts}"
        )
    results = (same(first), same(second))
    if results[0] != results[1]:
        old, new = ((it if isinstance(it, str) else pformat(it)).splitlines() for it in results)
        difference = "\n".join(unified_diff(old, new, "first", "second", n=1, lineterm=""))
        raise AssertionError(
            f"{second.command}: started warm, and gave something else than on the first machine; "
            f"give 'same' if it must (times, paths):\n{difference}"
        )


# -- in the process on the machine


def _main(path: str, how: str, *program: str) -> None:
    result = None
    process = os.getpid()

    def report() -> None:
        if os.getpid() != process:  # a forked child that exits like the program
            return
        caches = sys.modules.get("s3cache.cache")
        cache = None if caches is None else caches.current_cache()
        with open(path, "wb") as file:
            pickle.dump((result, None if cache is None else cache.stats()), file)

    # It runs after s3cache's own exit, which finishes the uploads: they count too.
    atexit.register(report)
    if how == "call":
        function = pkgutil.resolve_name(program[0])
        result = json.loads(json.dumps(function(*json.loads(program[1]))))
        return
    sys.argv = [*program]
    if how == "module":
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    _main(*sys.argv[1:])
