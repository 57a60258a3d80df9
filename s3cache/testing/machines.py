"""Machines that have never seen a program: what a fresh node of a fleet or of CI is.

A :class:`Machine` is a directory. What a process there finds of its surroundings is empty: home,
caches, temporary directory, s3cache's local tier. Two machines share nothing but what a test gives
both of them, as a rule the URL of a bucket.
"""

from __future__ import annotations

import enum
import json
import os
import shlex
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from s3cache.stats import CacheStats

__all__ = ["Machine", "Outcome", "ProgramError"]

_PLACES = {
    "HOME": "home",
    "XDG_CACHE_HOME": "home/.cache",
    "TMPDIR": "tmp",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "S3CACHE_LOCAL_DIR": "local",
}
# What belongs to the installation, and not to what its user did before.
_KEPT = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "CC", "CXX"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"),
)
_OUTPUT_LINES = 60


@dataclass(frozen=True)
class Outcome:
    """What a process on a :class:`Machine` came to.

    Attributes:
        command: what was run, for messages.
        exit_code: its exit status, negative for a signal; ``None`` if it was ended for its time.
        stdout, stderr: what it wrote.
        result: what the function returned that was called, as JSON has it; else ``None``.
        recorded: what the cache counted; ``None`` without one. Most tests want :attr:`stats`.
    """

    command: str
    exit_code: int | None
    stdout: str
    stderr: str
    result: Any = None
    recorded: CacheStats | None = None

    @property
    def stats(self) -> CacheStats:
        """What the cache counted that the program enabled last, with the uploads at its exit.

        Raises:
            AssertionError: it enabled none. A test that looks for no misses must not pass then.
        """
        if self.recorded is None:
            raise AssertionError(
                f"{self.command}: there was no cache; does the program enable s3cache, does "
                f"s3cache support this torch, did it leave by sys.exit()?\n{_end(self.stderr)}"
            )
        return self.recorded


class ProgramError(AssertionError):
    """A program on a :class:`Machine` ended badly, or not in time.

    Attributes:
        outcome: what there is of it.
    """

    def __init__(self, outcome: Outcome, how: str) -> None:
        super().__init__(f"{outcome.command}: {how}\n{_end(outcome.stdout + outcome.stderr)}")
        self.outcome = outcome


class Machine:
    """A disk of its own, and the processes that run on it one after the other.

    A second machine is another directory. A second process on this one finds what the first has
    left: that is how a restart on the same node is tested.

    Args:
        root: where everything is that s3cache and torch write. It is made.
        environment: variables of all its processes, besides the few that a fresh machine has.
    """

    def __init__(self, root: str | os.PathLike[str], **environment: str) -> None:
        self.root = Path(root).absolute()
        for place in _PLACES.values():
            (self.root / place).mkdir(parents=True, exist_ok=True)
        #: The whole environment of its processes.
        self.environment: dict[str, str] = {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            **{name: str(self.root / place) for name, place in _PLACES.items()},
            "USER": self.root.name,
            # A test waits for the uploads that a job would leave to the next one there.
            "S3CACHE_EXIT_TIMEOUT_S": "60",
            # ... and is no worse a test for running on a busy machine.
            "S3CACHE_LOOKUP_TIMEOUT_S": "60",
            **environment,
        }

    def __repr__(self) -> str:
        return f"Machine({str(self.root)!r})"

    def run(
        self,
        *command: str | os.PathLike[str],
        environment: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout_s: float = 600,
        python: str = sys.executable,
    ) -> Outcome:
        """Run ``python *command``: a script or ``-m`` and a module, and arguments for it.

        Args:
            environment: variables of this process only.
            cwd: where it runs; where the test runs, unless given. That is not empty.
            timeout_s: after that time it is killed, with what it has started.
            python: the interpreter; it must have s3cache too.

        Raises:
            ProgramError: its exit status is not 0, or it took too long.
        """
        words = [os.fspath(word) for word in command]
        how = "run"
        if words[:1] == ["-m"]:
            how, words = "module", words[1:]
        if not words or words[0].startswith("-"):
            raise ValueError(f"{command} names neither a script nor, after -m, a module")
        return self._execute([how, *words], environment, cwd, timeout_s, python)

    def call(
        self,
        function: str | Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout_s: float = 600,
        python: str = sys.executable,
    ) -> Outcome:
        """Call a function of an importable module; the outcome has its result.

        It is imported there again, also from where this process alone finds it: tests may keep it
        in their own module. Arguments and result are what JSON can hold.

        Args:
            function: it, or ``"module:name"``, so that the test need not import what it imports.
            environment, cwd, timeout_s, python: as for :meth:`run`.

        Raises:
            ProgramError: it raised, or ended the process, or took too long.
        """
        theirs = dict(environment or {})
        given = theirs.get("PYTHONPATH", self.environment.get("PYTHONPATH", ""))
        theirs["PYTHONPATH"] = os.pathsep.join(filter(None, [given, *_project_paths()]))
        words = ["call", _name(function), json.dumps(arguments)]
        return self._execute(words, theirs, cwd, timeout_s, python)

    def _execute(
        self,
        words: list[str],
        environment: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        timeout_s: float,
        python: str,
    ) -> Outcome:
        report = self.root / "report.json"
        report.unlink(missing_ok=True)
        process = subprocess.Popen(  # noqa: S603 - to run a test's program is what it is for
            [python, "-m", "s3cache.testing._runner", str(report), *words],
            env={**self.environment, **(environment or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that what it starts can be ended with it
        )
        command = shlex.join(words)
        try:
            written = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            outcome = Outcome(command, None, *_kill(process))
            raise ProgramError(outcome, f"still running after {timeout_s} s") from None
        except BaseException:
            _kill(process)
            raise
        found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        stats = _typed(CacheStats | None, found.get("stats"))
        outcome = Outcome(command, process.returncode, *written, found.get("result"), stats)
        if process.returncode:
            raise ProgramError(outcome, f"exit status {process.returncode}")
        return outcome


def _kill(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a process with all that it has started, and return what it had written."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that left its session holds the pipes open; it is not waited for.
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired as exc:
        return _text(exc.stdout), _text(exc.stderr)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _end(output: str) -> str:
    lines = output.splitlines()
    cut = [f"... {len(lines) - _OUTPUT_LINES} lines"] if len(lines) > _OUTPUT_LINES else []
    return "\n".join([*cut, *lines[-_OUTPUT_LINES:]])


def _name(function: str | Callable[..., object]) -> str:
    name = function
    if not isinstance(name, str):
        name = f"{name.__module__}:{name.__qualname__}"
    module, _, attributes = name.partition(":")
    if not attributes or "<" in attributes or module == "__main__":
        raise ValueError(f"{name!r} cannot be imported elsewhere; give a function of a module")
    return name


def _project_paths() -> list[str]:
    """Return where this process finds modules that are not installed, as pytest adds them."""
    schemes = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [*map(sysconfig.get_path, schemes), *site.getsitepackages()]
    paths = dict.fromkeys(os.path.abspath(path) for path in sys.path if not path.endswith(".zip"))
    return [
        path for path in paths if not any(Path(path).is_relative_to(place) for place in installed)
    ]


def _typed(kind: Any, value: Any) -> Any:
    """Return ``value``, as JSON has it, as the type of an annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if type(None) in arguments:
        return _typed(arguments[0], value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        values = {field.name: value[field.name] for field in fields(kind)}
        return kind(**{name: _typed(hints[name], each) for name, each in values.items()})  # type: ignore[operator]
    if origin is tuple:
        return tuple(_typed(arguments[0], each) for each in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {_typed(arguments[0], k): _typed(arguments[1], v) for k, v in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    return value
