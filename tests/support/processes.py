"""Machines with their own disks, and the processes that run on them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from s3cache import testing
from tests.support.waiting import LONG_S

ROOT = Path(__file__).parents[2]
KEYS: dict[str, Any] = {
    "access_key": "testing",
    "secret_key": "testing-secret",
    "region": "us-east-1",
}

_numbers = itertools.count()


class Machine:
    """A :class:`s3cache.testing.Machine` with a local tier, for processes that a test kills.

    Args:
        options: of the cache, the same for every process on this machine.
    """

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.tier = root / "tier"
        self.options = {"local_dir": str(self.tier), **options}
        self.processes: list[Process] = []
        fresh = testing.Machine(root, PYTHONPATH=str(ROOT), AWS_EC2_METADATA_DISABLED="true")
        # The options set everything: no variable does.
        self.environment = {
            name: value
            for name, value in fresh.environment.items()
            if not name.startswith("S3CACHE_")
        }

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.end()

    def start(
        self,
        *steps: list[Any],
        events: bool = False,
        module: str = "tests.support.worker",
        **options: Any,
    ) -> Process:
        config = {"options": {**self.options, **options}, "steps": steps, "events": events}
        output = self.root / f"process-{next(_numbers)}"
        process = Process(module, config, self.environment, output)
        self.processes.append(process)
        return process

    def run(self, *steps: list[Any], **options: Any) -> list[str]:
        """Run a process to its end, and return its lines."""
        return self.start(*steps, **options).finish()

    def pending(self) -> list[str]:
        """Return the names of all objects that are recorded as pending, for any process."""
        return [
            unquote(record.name.partition("@")[0]).partition("/")[2]
            for record in self.tier.glob("pending/*@*")
        ]

    def let_an_hour_pass(self) -> None:
        """Make the files of dead processes an hour old: younger files may still be in use."""
        then = time.time() - 3_601
        for path in self.leftovers():
            os.utime(path, (then, then))

    def leftovers(self) -> list[Path]:
        """Return the files that dead or careless processes have left."""
        return [*self.tier.glob("pending/*"), *self.tier.glob("staging/*")]


class Process:
    """A running worker. ``lines`` is its output so far."""

    def __init__(
        self, module: str, config: dict[str, Any], environment: dict[str, str], output: Path
    ) -> None:
        self._output = output
        with open(f"{output}.out", "wb") as stdout, open(f"{output}.err", "wb") as stderr:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(config)],
                cwd=environment["HOME"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,  # so that forked children can be ended with it
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_over(self) -> bool:
        return self._popen.poll() is not None

    @property
    def lines(self) -> list[str]:
        return Path(f"{self._output}.out").read_text().split("\n")[:-1]

    @property
    def errors(self) -> str:
        return Path(f"{self._output}.err").read_text()

    def acknowledged(self) -> list[str]:
        """Return the keys for which ``save`` has returned."""
        return [line.split()[1] for line in self.said("saved ")]

    def said(self, start: str) -> list[str]:
        return [line for line in self.lines if line.startswith(start)]

    def until(self, start: str, count: int = 1) -> None:
        """Wait until it has written ``count`` lines that begin with ``start``."""
        end = time.monotonic() + LONG_S
        while len(self.said(start)) < count:
            is_lost = time.monotonic() > end or (self.is_over and len(self.said(start)) < count)
            assert not is_lost, f"did not write {start!r}: {self.lines} {self.errors}"
            time.sleep(0.001)

    def hear(self) -> None:
        self._popen.stdin.write("go on\n")  # type: ignore[union-attr]
        self._popen.stdin.flush()  # type: ignore[union-attr]

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the process at once with SIGKILL, as the kernel does when memory runs out."""
        self._popen.kill()
        self._popen.wait()

    def wait(self, within_s: float = LONG_S) -> int:
        """Return the exit status, negative for a signal."""
        try:
            return self._popen.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.lines} {self.errors}") from None

    def finish(self) -> list[str]:
        """Wait until the process ends, check that it succeeded, and return its lines."""
        assert self.wait() == 0, f"{self.lines} {self.errors}"
        return self.lines

    def end(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._popen.stdin.close()  # type: ignore[union-attr]
