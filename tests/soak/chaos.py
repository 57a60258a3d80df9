"""Faults, drawn at random: of the link, of the server, of the processes."""

from __future__ import annotations

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

__all__ = ["Chaos", "Server"]

_LINKS: dict[str, Callable[[random.Random], Link]] = {
    "link good": lambda _: Link(),
    "link hangs": lambda _: Link(flows=False),
    "link slow": lambda draw: Link(bytes_per_s=draw.choice([20_000, 200_000])),
    "link late": lambda draw: Link(delay_s=draw.uniform(0.05, 0.5)),
    "requests reset": lambda draw: Link(reset_up=draw.randrange(40_000), times=20),
    "answers reset": lambda draw: Link(reset_down=draw.randrange(40_000), times=20),
    "answers cut": lambda draw: Link(cut_down=draw.randrange(40_000), times=20),
}
_SERVER_DIES = 0.38


class Server:
    """The gateway that ``infra/rgw/run.sh`` has started; a moto server cannot be restarted."""

    def __init__(self, restart: Path | None) -> None:
        self._restart = restart

    @property
    def can_die(self) -> bool:
        return self._restart is not None

    def die(self) -> None:
        os.kill(int(Path(os.environ["S3CACHE_TEST_RGW_PIDFILE"]).read_text()), signal.SIGKILL)

    def come_back(self) -> None:
        if self._restart is not None:
            subprocess.run([str(self._restart)], check=True, capture_output=True)


class Chaos:
    """Something new every few seconds, until the end of the block; then all is right again.

    Args:
        dies_by_s: when the server has died once, if it can die.
    """

    def __init__(
        self,
        seed: int,
        proxy: Proxy,
        server: Server,
        workers: Callable[[], list[int]],
        *,
        dies_by_s: float,
    ) -> None:
        self.happened: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._proxy = proxy
        self._server = server
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
                self._happen()
        except BaseException as exc:
            self._error = exc

    def _happen(self) -> None:
        drawn = self._draw.random()
        if not self.happened["server killed"] and time.monotonic() > self._dies_by:
            drawn = _SERVER_DIES
        if drawn < 0.25:
            self._to_a_process(signal.SIGKILL, "process killed")
        elif drawn < 0.32:
            self._stop_one()
        elif drawn <= _SERVER_DIES and self._server.can_die:
            self.happened["server killed"] += 1
            self._server.die()
            self._over.wait(self._draw.uniform(0.5, 5.0))
            self._server.come_back()
        elif drawn < 0.46:
            self.happened["connections refused"] += 1
            self._proxy.refuse()
            self._over.wait(self._draw.uniform(0.5, 5.0))
            self._proxy.heal()
        else:
            # Every other time it is well again: some of what is saved has to arrive meanwhile.
            name = "link good" if drawn < 0.7 else self._draw.choice(list(_LINKS))
            self.happened[name] += 1
            self._proxy.link = _LINKS[name](self._draw)

    def _to_a_process(self, number: signal.Signals, what: str) -> int | None:
        running = self._workers()
        if not running:
            return None
        pid = self._draw.choice(running)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        self.happened[what] += 1
        return pid

    def _stop_one(self) -> None:
        """As a machine that swaps, or is suspended."""
        pid = self._to_a_process(signal.SIGSTOP, "process stopped for a while")
        if pid is not None:
            time.sleep(self._draw.uniform(0.2, 3.0))
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
