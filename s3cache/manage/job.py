"""A program that runs beside us, watched from outside by what its processes record.

Whatever it is, and however many processes it has: all that have the cache leave their lookups in
the local tier (:mod:`s3cache.records`), and how far they are where :data:`s3cache.settings.WATCHED`
is set.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from s3cache.errors import ConfigError
from s3cache.records import JOB, Run, job_here, read_run, run_names
from s3cache.settings import WATCHED

__all__ = ["POLL_S", "Job", "last_sign", "steps_done"]

#: How often to look at it.
POLL_S = 0.5
_TERMINATE_S = 30.0
_STDERR = 2


class Job:
    """A command in a session of its own, with the cache on in all its processes, which are one job.

    Args:
        root: its local tier.
        environment: of the command, beside what makes it record.
        to_stderr: what it writes to its standard output goes to standard error.

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

    @property
    def exit_code(self) -> int | None:
        """Its own, once it has ended."""
        return self._process.poll()

    def wait(self) -> None:
        """For a moment, or until it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(POLL_S)

    def runs(self) -> list[Run]:
        """What its processes have recorded so far."""
        found = []
        for name in _names(self._root):
            if name not in self._before:
                with suppress(OSError, ConfigError):  # it has gone meanwhile
                    found.append(read_run(self._root, name))
        return found

    def end(self) -> None:
        """End all its processes, those that it has started too: with SIGTERM, which they may take
        half a minute to obey.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERMINATE_S)


def last_sign(runs: Sequence[Run]) -> float | None:
    """When the cache was last needed, Unix time: now, while something compiles; ``None`` if never.

    A process that was killed while it compiled does not count.
    """
    if any(run.compiling and _is_alive(run.pid) for run in runs):
        return time.time()
    times = [record.time for run in runs for record in run.records]
    return max([*times, *(run.noted for run in runs)]) if times else None


def steps_done(runs: Sequence[Run]) -> int:
    """How often the optimizers of all processes that have any have stepped."""
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
