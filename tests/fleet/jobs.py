"""A job of several processes, a mishap of a process that leads, and the outcome."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socketserver
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tests.fleet import worker
from tests.fleet.worker import STEPS

Where: TypeAlias = Literal["node", "nodes"]
Deed: TypeAlias = Literal["kill", "stop", "cut", "slow"]

PLACES: tuple[Where, ...] = ("node", "nodes")
DEEDS: tuple[Deed, ...] = ("kill", "stop", "cut", "slow")
#: Seconds that a claim may take beyond ``wait_s``: a last request to a store that hangs, a busy
#: machine.
SLACK_S = 20.0
# The longest time that each step takes. A mishap happens within this time.
_SPANS = {"claim": 0.05, "compile": 0.3, "save": 0.01, "upload": 0.05, "release": 0.05}
_STOLEN_AFTER_S = 15.0

_fresh = multiprocessing.get_context("forkserver")


class Process:
    """A new process that runs a function of :mod:`tests.fleet.worker`; any thread may use it."""

    _mutex = threading.Lock()  # each start in multiprocessing polls all processes

    @staticmethod
    def prepare() -> None:
        """Import the worker in the server that forks processes, unless it runs already."""
        _fresh.set_forkserver_preload([worker.__name__])

    def __init__(self, function: str, config: dict[str, Any]) -> None:
        arguments = {"target": getattr(worker, function), "args": (config,), "daemon": True}
        with self._mutex:
            self._process: Any = _fresh.Process(**arguments)
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def exitcode(self) -> int | None:
        with self._mutex:
            code: int | None = self._process.exitcode
            return code

    def wait(self, within_s: float) -> int | None:
        """Return its exit code; None if it still runs."""
        end = time.monotonic() + within_s
        while (code := self.exitcode) is None and time.monotonic() < end:
            time.sleep(0.02)
        return code


@dataclass(frozen=True)
class Plan:
    """The plan of one run: the mishap, its victims, its step, and its moment in the step.

    Attributes:
        nodes: the number of ranks of each node.
        victims: the number of victims, which are the first processes that reach the step.
        lasts_s: the seconds for which a process is stopped, cut off or slow.
        ends: whether a stopped process is killed at the end instead of continued.
        restarts: whether a killed rank is started again.
        hangs: whether requests of a node that is cut off hang; else they are refused.
    """

    number: int
    where: Where
    step: str
    moment: str
    deed: Deed
    nodes: tuple[int, ...]
    graphs: int
    victims: int
    wait_s: float
    compile_s: float
    lasts_s: float
    ends: bool
    restarts: bool
    hangs: bool

    @classmethod
    def draw(cls, number: int, seed: int) -> Plan:
        """Take steps, deeds and places in turn; draw all other values."""
        draw = random.Random(f"{seed}-{number}")
        turn, place = divmod(number, len(PLACES))
        turn, deed = divmod(turn, len(DEEDS))
        where = PLACES[place]
        ranks = (3, 4) if where == "node" else (1, 2)
        return cls(
            number,
            where,
            STEPS[turn % len(STEPS)],
            draw.choice(["in", "in", "after"]),
            DEEDS[deed],
            tuple(draw.choice(ranks) for _ in range(1 if where == "node" else draw.choice([2, 3]))),
            graphs=draw.choice([1, 2]),
            victims=draw.choice([1, 1, 2]),
            wait_s=draw.choice([4.0, 6.0, 8.0] if where == "node" else [4.0, 25.0, 25.0]),
            compile_s=draw.uniform(0.1, 0.5),
            lasts_s=draw.choice([draw.uniform(0.2, 3), draw.uniform(3, 20)]),
            ends=draw.random() < 0.5,
            restarts=draw.random() < 0.5,
            hangs=draw.random() < 0.5,
        )

    def short(self) -> Plan:
        """Return this plan with waits of a few seconds, for a test that runs often."""
        return replace(self, wait_s=2.0, lasts_s=min(self.lasts_s, 2.0), graphs=1, victims=1)

    @property
    def node_of_each(self) -> list[int]:
        return [node for node, ranks in enumerate(self.nodes) for _ in range(ranks)]

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.step, self.deed, self.where


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        kind: step, deed and place.
        counts: the numbers of mishaps, waits, and other messages.
        hangs, lost, wrong, failed: descriptions of failures.
        longest_s: the seconds by which the longest claim exceeded ``wait_s``; negative if none did.
    """

    kind: tuple[str, str, str]
    number: int
    counts: Counter[str] = field(default_factory=Counter)
    hangs: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    longest_s: float = -1e9

    @property
    def bad(self) -> list[str]:
        return [*self.hangs, *self.lost, *self.wrong, *self.failed]

    def judge_waits(self, control: Control, wait_s: float) -> None:
        """Count mishaps and waits; find waits beyond the bound, and repeated waits to the bound."""
        self.counts["mishaps"] = len(control.victims)
        for what in ("taken over", "compiled"):
            self.counts[what] = len(control.of(what))
        bounds: Counter[tuple[int, str]] = Counter()
        for each in control.of("waited"):
            if each["holder"]:
                self.counts["waits"] += 1
                self.counts["to the bound"] += each["timed_out"]
            if each["pid"] in control.victims:
                continue  # it may have been stopped
            self.longest_s = max(self.longest_s, each["took_s"] - wait_s)
            bounds[each["pid"], each["holder"]] += each["timed_out"] and each["took_s"] >= wait_s
            if each["took_s"] > wait_s + SLACK_S:
                self.hangs.append(f"rank {each['rank']} waited {each['took_s']:.1f} s")
        worked = {each["pid"]: each["at"] for each in control.of("worked")}
        for each in control.of("ended"):
            took_s = each["at"] - worked[each["pid"]]
            if each["pid"] not in control.victims and took_s > SLACK_S:
                self.hangs.append(f"rank {each['rank']} took {took_s:.1f} s to close")
        for (_, holder), times in bounds.items():
            if times > 1:
                self.hangs.append(f"{times} waits to the bound for {holder}")


class Control:
    """Receives the messages of processes, and carries out the plan's mishap on some of them.

    Attributes:
        messages: all messages so far.
        victims: the process ids of the victims.
    """

    def __init__(self, path: Path, plan: Plan, mishaps: Mishaps) -> None:
        self.path, self._plan, self._mishaps = str(path), plan, mishaps
        self.messages: list[dict[str, Any]] = []
        self.victims: set[int] = set()
        self._mutex = threading.Lock()
        control = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    control._hear(json.loads(self.rfile.readline()))
                    self.wfile.write(b"\n")

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Server(self.path, Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, what: str) -> list[dict[str, Any]]:
        with self._mutex:
            return [each for each in self.messages if each["what"] == what]

    def _hear(self, message: dict[str, Any]) -> None:
        plan, pid = self._plan, message["pid"]
        with self._mutex:
            self.messages.append({"at": time.monotonic(), **message})
            place = (message.get("step"), message.get("moment"))
            happens = (
                place == (plan.step, plan.moment)
                and pid not in self.victims
                and len(self.victims) < plan.victims
            )
            if happens:
                self.victims.add(pid)
        if happens:
            within_s = 0.0 if plan.moment == "after" else _SPANS[plan.step]
            self._mishaps.begin(pid, message["node"], within_s)


class Mishaps:
    """Carries out the plan's mishap, on processes and on their nodes' connection to the store."""

    def __init__(self, plan: Plan, node_dirs: list[Path]) -> None:
        self._plan, self._node_dirs = plan, node_dirs
        self._draw = random.Random(f"mishaps {plan.number}")
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, pid: int, node: int, within_s: float) -> None:
        """Start the mishap now, or within ``within_s``; it continues in the background."""
        delay_s = self._draw.uniform(0, within_s)
        began = threading.Event()

        def run() -> None:
            if within_s:
                began.set()
                self._over.wait(delay_s)
            self._happen(pid, node, began)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        began.wait(10)

    def _happen(self, pid: int, node: int, began: threading.Event) -> None:
        plan = self._plan
        link = self._node_dirs[node] / plan.deed  # read by the processes of the node
        if plan.deed in ("cut", "slow"):
            delay_s = str(self._draw.uniform(0.1, 1.0))
            how = delay_s if plan.deed == "slow" else "hang" if plan.hangs else "refuse"
            link.with_suffix(".new").write_text(how)
            link.with_suffix(".new").replace(link)
        else:
            _send(pid, signal.SIGKILL if plan.deed == "kill" else signal.SIGSTOP)
        began.set()
        end = time.monotonic() + plan.lasts_s
        while plan.deed == "slow" and time.monotonic() < end and not self._over.is_set():
            _send(pid, signal.SIGSTOP)  # runs a tenth of the time
            self._over.wait(0.18)
            _send(pid, signal.SIGCONT)
            self._over.wait(0.02)
        if plan.deed in ("cut", "stop"):
            self._over.wait(plan.lasts_s)
        if plan.deed == "stop":
            if plan.ends:
                _send(pid, signal.SIGKILL)
            _send(pid, signal.SIGCONT)
        link.unlink(missing_ok=True)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class Job:
    """One run: ranks on their nodes, a later process on each node, and a reader of all entries."""

    def __init__(self, plan: Plan, root: Path) -> None:
        self._plan, self._root = plan, root
        self._nodes = [root / f"n{number}" for number in range(len(plan.nodes))]
        for node in self._nodes:
            node.mkdir(parents=True)
        self._processes: list[Process] = []
        self.outcome = Outcome(plan.kind, plan.number)

    def run(self) -> Outcome:
        plan = self._plan
        with ExitStack() as stack:
            stack.callback(self._end_all)
            mishaps = Mishaps(plan, self._nodes)
            stack.callback(mishaps.end)
            control = stack.enter_context(Control(self._root / "control", plan, mishaps))
            self._work(control)
            mishaps.end()
            self._end_all()
            for number in range(len(self._nodes)):
                self._later("adopt", control, "later", number)
            self._later("read", control, "reader", 0)
            self._judge(control)
        return self.outcome

    def _start(self, function: str, control: Control, rank: str, node: int) -> Process:
        config = {
            "url": f"file://{self._root / 'bucket'}?create=1",
            "node": str(self._nodes[node]),
            "number": node,
            "rank": rank,
            "control": control.path,
            "log": str(self._root / f"{len(self._processes)}.log"),
            "wait_s": self._plan.wait_s,
            "leases": "on" if self._plan.where == "nodes" else "off",
            "compile_s": self._plan.compile_s,
            "graphs": self._plan.graphs,
        }
        self._processes.append(Process(function, config))
        return self._processes[-1]

    def _work(self, control: Control) -> None:
        plan = self._plan
        ranks = {str(rank): node for rank, node in enumerate(plan.node_of_each)}

        def start(rank: str) -> Process:
            return self._start("rank", control, rank, ranks[rank])

        running = {rank: start(rank) for rank in ranks}
        # A rank waits to the bound once for each victim, and then for late compilations of others.
        # It does so twice if it is started again.
        rounds, halves = plan.victims + 2, 2 * plan.graphs
        allowed_s = 60 + plan.lasts_s + rounds * (plan.wait_s + SLACK_S)
        allowed_s += _STOLEN_AFTER_S * plan.victims + 10 * halves * plan.compile_s * len(ranks)
        deadline = time.monotonic() + allowed_s
        restarted: set[str] = set()
        while running and time.monotonic() < deadline:
            for rank, process in [*running.items()]:
                if (code := process.exitcode) is None:
                    continue
                del running[rank]
                was_killed = code == -signal.SIGKILL and process.pid in control.victims
                if was_killed and plan.restarts and rank not in restarted:
                    restarted.add(rank)
                    running[rank] = start(rank)
                elif code and not was_killed:
                    self.outcome.failed.append(f"rank {rank} ended with {code}")
            time.sleep(0.02)
        self.outcome.hangs += [f"rank {rank} runs after {allowed_s:.0f} s" for rank in running]

    def _later(self, function: str, control: Control, name: str, node: int) -> None:
        code = self._start(function, control, name, node).wait(120)
        if code is None:
            self.outcome.hangs.append(f"{name} on node {node} runs after 120 s")
        elif code:
            self.outcome.failed.append(f"{name} on node {node} ended with {code}")

    def _end_all(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                _send(process.pid, signal.SIGKILL)
                process.wait(10)

    # -- the judgement

    def _judge(self, control: Control) -> None:
        """Check that the bucket has each saved whole graph, and the saved halves of all others."""
        outcome = self.outcome
        outcome.judge_waits(control, self._plan.wait_s)
        outcome.wrong = [f"{each['rank']}: {each['key']}" for each in control.of("wrong")]
        logs = [log.read_text(errors="replace") for log in self._root.glob("*.log")]
        outcome.failed += [
            text[-3000:] for text in logs if "Traceback" in text or " ERROR " in text
        ]
        stored = {each["key"] for each in control.of("stored")}
        saved = {(each["node"], each["key"]) for each in control.of("saved") if each["durable"]}
        for whole, halves in worker.graphs(self._plan.graphs).items():
            for node in range(len(self._nodes)):
                needed = [whole] if (node, whole) in saved else halves
                lost = [key for key in needed if (node, key) in saved and key not in stored]
                self.outcome.lost += [f"{key} of node {node}" for key in lost]
