"""Run processes on several machines under random faults, and collect the results."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from s3cache.store import S3Options
from tests.support.processes import Machine, Process
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


MACHINES, PROCESSES = 2, 8
WORKER = "tests.soak.worker"
_SAMPLE_S = 2.0
# The time that saved entries have to arrive after the last fault.
_ARRIVAL_S = 300.0
# Bounds of pooled resources: connections, threads for calls to disks (s3cache/util/threads.py),
# threads of concurrent.futures, and four others.
_BOUNDS = {
    "sockets": S3Options("any").max_pool_connections + 4,
    "threads": 16 + min(32, (os.cpu_count() or 1) + 4) + 4,
}


@dataclass(frozen=True)
class Growth:
    """The early median, the late median and the maximum of one number of a process."""

    what: str
    early: float
    late: float
    most: float

    @classmethod
    def of(cls, what: str, samples: list[float]) -> Growth:
        """Compare the second fifth of samples with the last one: early growth is not a leak."""
        fifth = max(1, len(samples) // 5)
        early = statistics.median(samples[fifth : 2 * fifth] or samples)
        return cls(what, early, statistics.median(samples[-fifth:]), max(samples))

    @property
    def is_flat(self) -> bool:
        """Whether the number is within its bound, or grew by at most a quarter or 32."""
        return self.late <= _BOUNDS.get(self.what, max(1.25 * self.early, self.early + 32))


@dataclass
class Results:
    """The results of a run. ``slowest_ms`` and ``p99_ms`` have a value for each kind of line."""

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


class Fleet:
    """Processes of all machines. The first one of each is never killed: it must not grow."""

    def __init__(self, machines: list[Machine], seed: int) -> None:
        self._machines = machines
        self._seed = seed
        self._names = [f"w{number}" for number in range(PROCESSES)]
        self._running: dict[str, Process] = {}  # by name

    @property
    def survivors(self) -> list[int]:
        return [self._running[name].pid for name in self._names[:MACHINES]]

    def killable(self) -> list[int]:
        """Return the running processes that may be killed."""
        running = [self._running.get(name) for name in self._names[MACHINES:]]
        return [each.pid for each in running if each is not None and not each.is_over]

    def start_missing(self) -> None:
        for number, name in enumerate(self._names):
            if name not in self._running or self._running[name].is_over:
                step = ["mix", name, self._names, self._seed]
                machine = self._machines[number % MACHINES]
                self._running[name] = machine.start(step, module=WORKER)
                self._seed += 1

    def end(self) -> None:
        """End all processes as a scheduler does; later ones upload their pending entries."""
        for process in self._running.values():
            process.signal(signal.SIGTERM)
        for process in self._running.values():
            process.wait(60)

    def processes(self) -> Iterator[Process]:
        return chain.from_iterable(machine.processes for machine in self._machines)


def soak(
    root: Path,
    server_port: int,
    where: dict[str, Any],
    restart: Path | None,
    seconds: float,
    seed: int,
) -> Results:
    """Run for so many seconds; then wait for all uploads, and check all entries."""
    results = Results()
    began = time.monotonic()
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(server_port))
        # A process may hold a quarter of these bytes in memory for uploads.
        holds = {"upload_queue_max_bytes": "32MiB"}
        options = {**where, "endpoint_url": proxy.url, "local_max_files": 3000, **holds}
        machines = [
            stack.enter_context(Machine(root / f"machine-{number}", **options))
            for number in range(MACHINES)
        ]
        fleet = Fleet(machines, seed)
        samples: list[dict[str, list[float]]] = [defaultdict(list) for _ in machines]
        fleet.start_missing()
        try:
            with Chaos(seed, proxy, restart, fleet.killable, dies_by_s=seconds / 3) as chaos:
                while time.monotonic() - began < seconds:
                    time.sleep(_SAMPLE_S)
                    for pid, taken in zip(fleet.survivors, samples, strict=True):
                        _sample(pid, taken)
                    proxy.requests.clear()  # there are many requests, and none is needed
                    fleet.start_missing()
        finally:
            fleet.end()
        results.happened = chaos.happened
        results.seconds = time.monotonic() - began
        _settle(machines)
        lines = [line.split() for process in fleet.processes() for line in process.lines]
        _count(lines, results)
        saved = {words[1] for words in lines if words[0] == "saved"}
        results.acknowledged = len(saved)
        reader = stack.enter_context(Machine(root / "reader", **{**options, "local": False}))
        _read_all(reader, sorted(saved), results)
        for what in samples[0]:
            of_each = [Growth.of(what, taken[what]) for taken in samples]
            results.growth.append(max(of_each, key=lambda one: one.late - one.early))
        # Faults are logged as warnings only.
        texts = [process.errors for process in (*fleet.processes(), *reader.processes)]
        results.errors = [text[-4000:] for text in texts if "Traceback" in text or "ERROR" in text]
    return results


def _sample(pid: int, taken: dict[str, list[float]]) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        sockets = len(process.net_connections("all"))
        taken["memory_mib"].append(process.memory_info().rss / (1 << 20))
        taken["threads"].append(process.num_threads())
        taken["sockets"].append(sockets)
        taken["files"].append(process.num_fds() - sockets)


def _settle(machines: list[Machine]) -> None:
    """Let a later process of each machine upload the pending entries of dead processes."""
    for machine in machines:
        deadline = time.monotonic() + _ARRIVAL_S
        while machine.pending() and time.monotonic() < deadline:
            machine.let_an_hour_pass()
            machine.start(["flush", 60.0]).wait()


def _read_all(reader: Machine, keys: list[str], results: Results) -> None:
    """Read all keys from the bucket on a machine without a disk; absent entries are lost."""
    found = set[str]()
    for start in range(0, len(keys), 500):
        process = reader.start(["look_up", keys[start : start + 500]], module=WORKER)
        process.wait()
        lines = [line.split() for line in process.lines]
        found |= {words[1] for words in lines if words[0] in ("hit", "WRONG")}
        results.wrong += [words[1] for words in lines if words[0] == "WRONG"]
    results.lost = [key for key in keys if key not in found]


def _count(lines: list[list[str]], results: Results) -> None:
    took: dict[str, list[float]] = defaultdict(list)
    for words in lines:
        if words[0] in ("saved", "refused", "hit", "WRONG", "miss"):
            results.counts[words[0]] += 1
            took["save" if words[0] in ("saved", "refused") else "lookup"].append(float(words[2]))
        if words[0] == "miss":
            results.misses[words[3]] += 1
        if words[0] == "WRONG":
            results.wrong.append(words[1])
    for kind, times in took.items():
        times.sort()
        results.slowest_ms[kind] = times[-1]
        results.p99_ms[kind] = times[int(0.99 * (len(times) - 1))]
