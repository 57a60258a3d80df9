"""Random faults of the link, the server and the processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.support.proxy import Link, Proxy

_LINKS: dict[str, Callable[[random.Random], Link]] = {
    "link hangs": lambda _: Link(flows=False),
    "link slow": lambda draw: Link(bytes_per_s=draw.choice([20_000, 200_000])),
    "link late": lambda draw: Link(delay_s=draw.uniform(0.05, 0.5)),
    "requests reset": lambda draw: Link(reset_up=draw.randrange(40_000), times=20),
    "answers reset": lambda draw: Link(reset_down=draw.randrange(40_000), times=20),
    "answers cut": lambda draw: Link(cut_down=draw.randrange(40_000), times=20),
}
# Percentages. A good link is as likely as all bad links together, so that some saves arrive.
_WEIGHTS: dict[str, float] = {"kill": 25, "stop": 7, "server": 6, "refuse": 8, "link good": 27}
_WEIGHTS |= dict.fromkeys(_LINKS, 4.5)


class Chaos:
    """Causes a random fault every few seconds until the end of the block, then repairs the link.

    Args:
        restart: the script that restarts the server; without it the server is never killed.
        workers: a function that returns the processes that may be killed.
        dies_by_s: the time after which the server is killed if it was not killed before.
    """

    def __init__(
        self,
        seed: int,
        proxy: Proxy,
        restart: Path | None,
        workers: Callable[[], list[int]],
        *,
        dies_by_s: float,
    ) -> None:
        self.happened: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._proxy = proxy
        self._restart = restart
        self._workers = workers
        self._dies_by = time.monotonic() + dies_by_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._proxy.heal()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._over.wait(self._draw.uniform(1.0, 4.0)):
                self._cause_a_fault()
        except BaseException as exc:
            self._error = exc

    def _cause_a_fault(self) -> None:
        (what,) = self._draw.choices([*_WEIGHTS], [*_WEIGHTS.values()])
        if not self.happened["server killed"] and time.monotonic() > self._dies_by:
            what = "server"
        if what in ("kill", "stop"):
            self._kill_or_stop_a_process(is_killed=what == "kill")
        elif what == "server" and self._restart is not None:
            self.happened["server killed"] += 1
            os.kill(int(Path(os.environ["S3CACHE_TEST_RGW_PIDFILE"]).read_text()), signal.SIGKILL)
            self._over.wait(self._draw.uniform(0.5, 5.0))
            subprocess.run([str(self._restart)], check=True, capture_output=True)
        elif what == "refuse":
            self.happened["connections refused"] += 1
            self._proxy.refuse()
            self._over.wait(self._draw.uniform(0.5, 5.0))
            self._proxy.heal()
        elif what in _LINKS or what == "link good":
            self.happened[what] += 1
            self._proxy.link = _LINKS[what](self._draw) if what in _LINKS else Link()

    def _kill_or_stop_a_process(self, *, is_killed: bool) -> None:
        """Kill a process, or stop it for a while, like a machine that swaps or is suspended."""
        if running := self._workers():
            pid = self._draw.choice(running)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if is_killed else signal.SIGSTOP)
                self.happened["process killed" if is_killed else "process stopped for a while"] += 1
                if not is_killed:
                    time.sleep(self._draw.uniform(0.2, 3.0))
                    os.kill(pid, signal.SIGCONT)
