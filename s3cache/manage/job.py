"""A program that runs beside us, and is watched by what its processes record.

All its processes that have the cache leave their lookups in the local tier
(:mod:`s3cache.records`), and their progress where :data:`s3cache.settings.WATCHED` is set.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from s3cache.errors import ConfigError
from s3cache.records import JOB, Run, job_here, read_run, run_names
from s3cache.settings import WATCHED

__all__ = ["Job", "quiet_for_s", "steps_done"]

# How often to look at it.
_POLL_S = 0.5
_TERMINATE_S = 30.0
_STDERR = 2


class Job:
    """A command in a session of its own, with the cache on in all its processes, which are one job.

    As a context manager it ends all of them: with SIGTERM, and after half a minute with SIGKILL.

    Attributes:
        exit_code: its own, once it has ended.

    Args:
        root: its local tier.
        environment: of the command, beside what makes it record.
        to_stderr: send what it writes to its standard output to standard error.

    Raises:
        ConfigError: there is no such program.
    """

    def __init__(
        self,
        command: Sequence[str],
        root: str,
        environment: Mapping[str, str],
        *,
        to_stderr: bool = False,
    ) -> None:
        self.exit_code: int | None = None
        self._root = root
        self._before = set(_names(root))
        ours = {
            "S3CACHE_LOCAL_DIR": root,
            "S3CACHE_AUTOLOAD": "1",
            "S3CACHE_RECORD": "1",
            WATCHED: "1",
        }
        if not job_here():  # then each rank is one of a job already
            ours[JOB] = secrets.token_hex(4)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - it is what it was asked to run
                command,
                env={**environment, **ours},
                stdout=_STDERR if to_stderr else None,
                start_new_session=True,
            )
        except OSError as exc:
            raise ConfigError(
                f"command {command[0]}", f"cannot be run ({exc.strerror})", "give another"
            ) from None

    def looks(self, timeout_s: float | None) -> Iterator[list[Run]]:
        """Yield what its processes have recorded, every half second and once when it has ended.

        The last look is the one after ``timeout_s``, or after the end.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        is_over = False
        while not is_over:
            self.exit_code = self._process.poll()
            is_over = self.exit_code is not None or time.monotonic() > deadline
            yield self.runs()
            if not is_over:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_POLL_S)

    def runs(self) -> list[Run]:
        """Return what its processes have recorded so far."""
        found = []
        for name in _names(self._root):
            if name not in self._before:
                with suppress(OSError, ConfigError):  # it was removed in the meantime
                    found.append(read_run(self._root, name))
        return found

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)


def quiet_for_s(runs: Sequence[Run]) -> float:
    """Return for how long nothing was compiled or looked up; -1 if nothing ever was.

    A process that was killed while it compiled does not count as compiling.
    """
    if any(run.compiling and _is_alive(run.pid) for run in runs):
        return 0.0
    times = [record.time for run in runs for record in run.records]
    return time.time() - max([*times, *(run.noted for run in runs)]) if times else -1.0


def steps_done(runs: Sequence[Run]) -> int:
    """Return how often the optimizers of all processes that have any have stepped."""
    return min((run.steps for run in runs if run.steps), default=0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return pid > 0


def _names(root: str) -> list[str]:
    try:
        return run_names(root)
    except (OSError, ConfigError):
        return []
