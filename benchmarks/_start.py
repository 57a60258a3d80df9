"""The ways to start training, each in a fresh process with its own disk, and runs by turns."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from _first_step import Request
from _harness import Gateway, shuffled_rounds

from s3cache.testing import Machine

ROOT = Path(__file__).resolve().parent.parent

EAGER = "eager, nothing compiled"
COLD = "nothing cached"
MISS = "s3cache, nothing cached"
REDIS = "torch's Redis remote caches, empty disk"
MEGA = "torch's Mega-Cache, empty disk"
TORCH = "torch's own cache, warm disk"
LOCAL = "s3cache, local tier"
S3 = "s3cache from S3, empty disk"
PRECOMPILE = "TORCH_CACHING_PRECOMPILE=1, warm disk"
RECALL = "s3cache from S3, empty disk, with recall"

TIMED = ("first_s", "total_s", "first_cpu_s", "cpu_s")


@dataclass(frozen=True)
class Case:
    """One way to start.

    Attributes:
        request: work of the fresh process.
        environment: its variables, on top of the basic ones.
        disk: name of its disk; "" for an empty one.
        hit: whether torch must report a hit; None if it need not look the graph up.
        tier: the only tier of s3cache that must hit; "remote" if the disk is empty, "" for none.
        traced: whether Dynamo must trace.
        copy_of: disk to copy if the case's own disk is new, once this one exists.
    """

    request: Request
    environment: Mapping[str, str]
    disk: str = ""
    hit: bool | None = True
    tier: str = ""
    traced: bool = True
    copy_of: Path | None = None

    def check(self, answer: Mapping[str, Any]) -> None:
        """Raise :class:`UnexpectedStart` if the process started in another way."""
        if self.request.ranks > 1 and self.hit is False and not self.tier:
            return  # a rank may hit what another one has just compiled
        found = {"tiers": answer["tiers"], "traced": bool(answer["traced"])}
        if self.tier == "remote" and found["tiers"]:
            found["tiers"] = ["remote"]  # the disk was empty, so local entries were fetched
        meant = {"tiers": [self.tier] if self.tier else [], "traced": self.traced}
        if self.hit is not None:
            found["hit"], meant["hit"] = answer["hit"], self.hit
        if found != meant:
            raise UnexpectedStart(f"the process started with {found}, not with {meant}")


class UnexpectedStart(SystemExit):
    """A process did not start in the expected way."""


#: Seconds by name of the time, then by case, in the order of the rounds.
Samples: TypeAlias = dict[str, dict[str, list[float]]]


class Training:
    """A fresh process that has run its first step, and runs more on request.

    With several ranks, the answer is that of the first.
    """

    def __init__(self, request: Request, environment: Mapping[str, str]) -> None:
        text = json.dumps(asdict(replace(request, began_s=time.monotonic())))
        places = _places(request.ranks)
        self._process, *self._others = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "benchmarks" / "_first_step.py"), text],
                env={**environment, **place},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                text=True,
            )
            for rank, place in enumerate(places)
        ]
        self.answer: dict[str, Any] = self._read()
        if "error" in self.answer:
            raise UnexpectedStart(self.answer["error"])

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._process, *self._others):
            process.communicate()  # no more input: it ends
            if process.returncode:
                raise SystemExit(f"a process ended with status {process.returncode}")

    def steps_s(self, count: int) -> list[float]:
        """Run ``count`` steps; return the seconds of each."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        found: list[float] = self._read()
        return found

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with status {self._process.wait()}")
        return json.loads(line)


def _places(ranks: int) -> list[dict[str, str]]:
    """Return the variables of each rank; a single rank needs none."""
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [{**meeting, "RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(ranks)]


class Bench:
    """Cases, with their disks and servers.

    Args:
        name: name of the job; jobs of different names share nothing.
        environment: variables of every process.
        kernels: disk with kernels; once it exists, preparations copy it and do not compile them.
    """

    def __init__(
        self,
        root: Path,
        gateway: Gateway,
        redis_url: str,
        request: Request,
        name: str = "",
        environment: Mapping[str, str] | None = None,
        kernels: Path | None = None,
    ) -> None:
        # Compilers accept no path with a space.
        plain = name.replace(",", "").replace(" ", "-").lower()
        self._root = root / plain
        self._prefix = f"{plain}-" if plain else ""
        self._gateway = gateway
        self._request = request
        self._environment = {**(environment or {})}
        self._disks = 0
        self._prepared: set[str] = set()
        artifacts = str(self._root / "mega-cache")
        redis = {
            "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "1",
            "TORCHINDUCTOR_REDIS_URL": redis_url,
        }
        ours = replace(request, s3cache=True)
        shared = {**self._s3cache("shared"), "S3CACHE_RECALL": "off"}
        recall = {**shared, "S3CACHE_RECALL": "on"}
        precompile = {"TORCH_CACHING_PRECOMPILE": "1"}
        quiet = {"TORCH_LOGS": "-dynamo"}  # no line for each guard that precompile drops
        #: Runs to make before the measurements, in this order.
        self.preparations = {
            TORCH: Case(request, {}, disk="torch", hit=False, copy_of=kernels),
            REDIS: Case(replace(request, redis=True), redis, hit=False),
            MEGA: Case(replace(request, save_artifacts=artifacts), {}, hit=False),
            PRECOMPILE: Case(
                replace(request, save_artifacts=artifacts),
                {**precompile, **quiet},
                disk="precompile",
                hit=False,
                copy_of=self.disk("torch"),
            ),
            S3: Case(ours, shared, hit=False, copy_of=kernels),
            LOCAL: Case(ours, shared, disk="s3cache", tier="remote"),
            RECALL: Case(ours, recall, tier="remote"),
        }
        self.cases: dict[str, Callable[[], Case]] = {
            EAGER: lambda: Case(replace(request, compiled=False), {}, hit=None, traced=False),
            COLD: lambda: Case(request, {}, hit=False),
            MISS: lambda: Case(ours, self._s3cache(f"miss-{self._disks}"), hit=False),
            REDIS: lambda: Case(replace(request, redis=True), redis),
            MEGA: lambda: Case(replace(request, load_artifacts=artifacts), {}),
            TORCH: lambda: Case(request, {}, disk="torch"),
            LOCAL: lambda: Case(ours, shared, disk="s3cache", tier="local"),
            S3: lambda: Case(ours, shared, tier="remote"),
            PRECOMPILE: lambda: Case(
                request, precompile, disk="precompile", hit=None, traced=False
            ),
            RECALL: lambda: Case(ours, recall, hit=None, tier="remote", traced=False),
        }

    def disk(self, name: str) -> Path:
        """Return the path of a disk, which exists once a process has started with it."""
        return self._root / name

    def _s3cache(self, prefix: str) -> dict[str, str]:
        url = self._gateway.url(self._prefix + prefix)
        options = {**self._gateway.options(), "url": url, "strict": "true"}
        return {f"S3CACHE_{name.upper()}": value for name, value in options.items()}

    def prepare(self, names: Collection[str]) -> None:
        """Fill the disks and the store for those cases, once."""
        for name, case in self.preparations.items():
            wanted = name in names or (name == S3 and LOCAL in names)
            if wanted and name not in self._prepared:
                print(f"preparing: {name}", flush=True)
                self.run(case)
                self._prepared.add(name)

    def start(self, case: Case) -> Training:
        """Start a fresh process, and check that it started as the case says."""
        self._disks += 1
        disk = self.disk(case.disk or f"empty-{self._disks}")
        if case.copy_of and case.copy_of.exists() and not disk.exists():
            shutil.copytree(case.copy_of, disk, symlinks=True)
        variables = {"PYTHONPATH": str(ROOT), "S3CACHE_JOB_PROFILES": "1"}  # as for users
        variables |= {**self._environment, **case.environment}
        training = Training(case.request, Machine(disk, **variables).environment)
        try:
            case.check(training.answer)
        except UnexpectedStart:
            with training:
                raise
        return training

    def run(self, case: Case) -> dict[str, Any]:
        """Return the answer of a fresh process."""
        with self.start(case) as training:
            return training.answer

    def starter(self, name: str) -> Callable[[], dict[str, Any]]:
        """Return a function that runs the case of that name."""
        return lambda: self.run(self.cases[name]())


def measure(bench: Bench, names: Sequence[str], rounds: int) -> Samples:
    """Prepare the cases, and run all of them ``rounds`` times."""
    bench.prepare(names)
    return in_turns({name: bench.starter(name) for name in names}, rounds)


def in_turns(starts: Mapping[str, Callable[[], dict[str, Any]]], rounds: int) -> Samples:
    """Run all starts ``rounds`` times, in shuffled order; each returns its process's answer."""
    found: Samples = {timed: {name: [] for name in starts} for timed in TIMED}
    for number, order in enumerate(shuffled_rounds([*starts], rounds), 1):
        for name in order:
            answer = starts[name]()
            print(
                f"round {number}: {name}: first step {answer['first_s']:.3f} s, "
                f"from process start {answer['total_s']:.3f} s, CPU {answer['cpu_s']:.3f} s",
                flush=True,
            )
            for timed, samples in found.items():
                samples[name].append(answer[timed])
    return found
