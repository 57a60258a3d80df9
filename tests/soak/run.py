"""Machines with processes on them, a server behind a link, and the account in the end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.chaos import Chaos, Server
from tests.soak.vitals import Growth, Vitals, growth, vitals
from tests.support.processes import Machine
from tests.support.proxy import Proxy

__all__ = ["Account", "soak"]

MACHINES, PROCESSES = 2, 8
_SAMPLE_S = 2.0
# Once all is well again: what was saved has that long to arrive.
_ARRIVAL_S = 300.0


@dataclass
class Account:
    """What it came to. ``slowest_ms`` and ``p99_ms`` are of each kind of line."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    slowest_ms: dict[str, float] = field(default_factory=dict)
    p99_ms: dict[str, float] = field(default_factory=dict)
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    growth: list[Growth] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Started:
    """A process, and where it writes what came."""

    process: subprocess.Popen[bytes]
    log: Path

    def lines(self) -> Iterator[list[str]]:
        """The words of each line; a torn one is left out."""
        if self.log.exists():
            with open(self.log) as lines:
                for line in lines:
                    if line.endswith("\n"):
                        yield line.split()


class Fleet:
    """Processes of all machines. The first of each machine is never killed: it must not grow."""

    def __init__(self, root: Path, machines: list[Machine], seed: int) -> None:
        self._root = root
        self._machines = machines
        self._seed = seed
        self._all: list[Started] = []
        self._names = [f"w{number}" for number in range(PROCESSES)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}  # those that work, by name

    @property
    def elders(self) -> list[int]:
        return [self._running[name].pid for name in self._names[:MACHINES]]

    def mortals(self) -> list[int]:
        """Those that may be killed, and live."""
        running = [self._running.get(name) for name in self._names[MACHINES:]]
        return [each.pid for each in running if each is not None and each.poll() is None]

    def keep_up(self) -> None:
        """Start who is missing."""
        for name in self._names:
            process = self._running.get(name)
            if process is None or process.poll() is not None:
                self._running[name] = self.start(name, ["mix"]).process

    def start(self, name: str, *steps: list[Any], machine: Machine | None = None) -> Started:
        number = len(self._all)
        log = self._root / f"{number}.log"
        machine = machine or self._machines[self._names.index(name) % MACHINES]
        config = {
            "options": machine.options,
            "log": str(log),
            "name": name,
            "names": self._names,
            "seed": self._seed + number,
            "steps": steps,
        }
        with open(log.with_suffix(".err"), "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.worker", json.dumps(config)],
                cwd=machine.environment["HOME"],
                env=machine.environment,
                stderr=errors,
            )
        self._all.append(Started(process, log))
        return self._all[-1]

    def end(self) -> None:
        """As a scheduler ends them; what they cannot upload in time is left for others."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError("a process did not end 60 s after SIGTERM") from None

    def lines(self) -> Iterator[list[str]]:
        """What all of them have written."""
        for started in self._all:
            yield from started.lines()

    def errors(self) -> list[str]:
        """What was logged as an error, or was a traceback: faults are logged as warnings."""
        found = []
        for path in self._root.glob("*.err"):
            text = path.read_text(errors="replace")
            if "Traceback" in text or "ERROR" in text:
                found.append(text[-4000:])
        return found


def soak(
    root: Path, server_port: int, where: dict[str, Any], server: Server, seconds: float, seed: int
) -> Account:
    """Run for so many seconds; then have everything arrive, and look at all of it."""
    account = Account()
    began = time.monotonic()
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(server_port))
        # Of what waits for a server, a process may hold a quarter of this in memory.
        holds = {"upload_queue_max_bytes": "32MiB"}
        options = {**where, "endpoint_url": proxy.url, "local_max_files": 3000, **holds}
        machines = [
            stack.enter_context(Machine(root / f"machine-{number}", **options))
            for number in range(MACHINES)
        ]
        fleet = Fleet(root, machines, seed)
        samples: list[list[Vitals]] = [[] for _ in range(MACHINES)]
        fleet.keep_up()
        try:
            with Chaos(seed, proxy, server, fleet.mortals, dies_by_s=seconds / 3) as chaos:
                while time.monotonic() - began < seconds:
                    time.sleep(_SAMPLE_S)
                    for pid, taken in zip(fleet.elders, samples, strict=True):
                        if (now := vitals(pid)) is not None:
                            taken.append(now)
                    proxy.requests.clear()  # they are many, and not used
                    fleet.keep_up()
        finally:
            fleet.end()
        account.happened = chaos.happened
        account.seconds = time.monotonic() - began
        _settle(fleet, machines)
        _count(fleet, account)
        saved = {words[1] for words in fleet.lines() if words[0] == "saved"}
        account.acknowledged = len(saved)
        reader = stack.enter_context(Machine(root / "reader", **{**options, "local": False}))
        _read_all(fleet, reader, sorted(saved), account)
        merged = [growth(taken) for taken in samples]
        account.growth = [
            max(each, key=lambda one: one.late - one.early) for each in zip(*merged, strict=True)
        ]
        account.errors = fleet.errors()
    return account


def _settle(fleet: Fleet, machines: list[Machine]) -> None:
    """A later process of each machine uploads what the dead have left."""
    for machine in machines:
        deadline = time.monotonic() + _ARRIVAL_S
        while machine.pending() and time.monotonic() < deadline:
            machine.let_an_hour_pass()
            fleet.start("adopter", ["flush", 60.0], machine=machine).process.wait()


def _read_all(fleet: Fleet, reader: Machine, keys: list[str], account: Account) -> None:
    """From the bucket alone: a machine with no disk of its own; what is absent now is lost."""
    found = set()
    for start in range(0, len(keys), 500):
        part = fleet.start("reader", ["check", keys[start : start + 500]], machine=reader)
        part.process.wait()
        found |= {words[1] for words in part.lines() if words[0] in ("hit", "WRONG")}
    account.lost = [key for key in keys if key not in found]
    account.wrong = sorted({words[1] for words in fleet.lines() if words[0] == "WRONG"})


def _count(fleet: Fleet, account: Account) -> None:
    took: dict[str, list[float]] = defaultdict(list)
    for words in fleet.lines():
        if words[0] == "left":
            continue
        account.counts[words[0]] += 1
        took["lookup" if words[0] in ("hit", "miss", "WRONG") else "save"].append(float(words[2]))
        if words[0] == "miss":
            account.misses[words[3]] += 1
    for kind, times in took.items():
        times.sort()
        account.slowest_ms[kind] = times[-1]
        account.p99_ms[kind] = times[int(0.99 * (len(times) - 1))]
