"""How fast does training start: compiled before by this machine, by another one, or by nobody?

    make bench [ARGS="--rounds 9"]
    make bench-signed

One training step of a GPT, each time in a fresh process. What is compared takes turns in a
shuffled order, so that ratios hold on a busy machine where times do not. On an "empty disk" home,
caches and temporary directory are empty, so that torch's precompiled headers are gone too.

Later steps differ by a fifth from one second to the next, whatever made the code. So two processes
that are both alive take turns, a few steps each.

With ``--cpu`` it measures the CPU seconds of the process from its start to the end of the first
step instead, with one thread: those do not depend on what waits for what.

With ``--signed`` every entry is signed with Ed25519 and has to be, for the first steps and the
import of s3cache: that is to cost so little that the same bars are met.

Prints a table, writes every sample as JSON and a plot as SVG, and ends with status 1 where a bar
is missed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import _import
from _first_step import LAYERS, WIDTH, Request
from _harness import Bar, Gateway, Result, median_ratio, shuffled_rounds
from _plot import horizontal_bars

from s3cache.trust import generate

ROOT = Path(__file__).resolve().parent.parent

EAGER = "eager, nothing compiled"
COLD = "nothing cached"
MISS = "s3cache, nothing cached"
REDIS = "torch's Redis remote caches, empty disk"
MEGA = "torch's Mega-Cache, empty disk"
TORCH = "torch's own cache, warm disk"
LOCAL = "s3cache, local tier"
S3 = "s3cache from S3, empty disk"

BARS = (
    ("first step", "first_s", S3, REDIS, 0.08),
    ("first step", "first_s", S3, TORCH, 0.6),
    ("process start to the end of the first step", "total_s", S3, TORCH, 1.0),
    ("first step", "first_s", MISS, COLD, 1.03),
)
# "No more": two runs of the very same code differ by as much as is allowed here.
LATER_LIMIT = 1.02
# Other jobs are asked to start as fast as torch does on a machine that has compiled them.
OTHER_LIMIT = 1.0
OTHER_JOBS = {"DDP, 2 ranks": {"ranks": 2}, "24 layers": {"layers": 24}}
# CPU seconds that s3cache on an empty disk is to take of torch's on a warm one, by layers.
CPU_LIMITS = {6: 0.65, 24: 0.6}
_STEPS_A_TURN = 5
_TURNS = 20
_KEPT = ("PATH", "LANG", "OMP_NUM_THREADS")  # of the environment


@dataclass(frozen=True)
class Case:
    """One way to start.

    Attributes:
        request: for the fresh process.
        environment: its variables, on top of the basic ones.
        disk: names the disk it finds; "" for an empty one.
        hit: whether torch must report a hit, or nothing.
        tier: the tier of s3cache that must have it.
    """

    request: Request
    environment: Mapping[str, str]
    disk: str = ""
    hit: bool | None = True
    tier: str = ""


#: Seconds by what was timed, then by case, in the order of the rounds.
Samples: TypeAlias = dict[str, dict[str, list[float]]]


class Training:
    """A fresh process that has done its first step, and does more as it is asked to.

    Of several ranks, the answer is that of the first.
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

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._process, *self._others):
            process.communicate()  # no more input: it ends
            if process.returncode:
                raise SystemExit(f"a process ended with status {process.returncode}")

    def steps_s(self, count: int) -> list[float]:
        """Seconds of that many steps, one by one."""
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
    """What tells each rank where it is; nothing where there is one."""
    if ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [{**meeting, "RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(ranks)]


class Bench:
    """Cases, and the disks and servers they start from.

    Args:
        name: of the job; jobs of different names share nothing.
        trust: settings of s3cache that say who signs and who is trusted.
    """

    def __init__(
        self,
        root: Path,
        gateway: Gateway,
        redis_url: str,
        request: Request,
        name: str = "",
        trust: Mapping[str, str] | None = None,
    ) -> None:
        # Compilers take no path with a space in it.
        plain = name.replace(",", "").replace(" ", "-").lower()
        self._root = root / plain
        self._prefix = f"{plain}-" if plain else ""
        self._gateway = gateway
        self._request = request
        self._trust = {**(trust or {})}
        self._disks = 0
        artifacts = str(self._root / "mega-cache")
        redis = {
            "TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_REMOTE_CACHE": "1",
            "TORCHINDUCTOR_REDIS_URL": redis_url,
        }
        ours = replace(request, s3cache=True)
        shared = self._s3cache("shared")
        #: What has to happen before anything is measured, in this order.
        self.preparations = {
            TORCH: Case(request, {}, disk="torch", hit=False),
            REDIS: Case(replace(request, redis=True), redis, hit=False),
            MEGA: Case(replace(request, save_artifacts=artifacts), {}, hit=False),
            S3: Case(ours, shared, hit=False),
            LOCAL: Case(ours, shared, disk="s3cache", tier="remote"),
        }
        self.cases: dict[str, Callable[[], Case]] = {
            EAGER: lambda: Case(replace(request, compiled=False), {}, hit=None),
            COLD: lambda: Case(request, {}, hit=False),
            MISS: lambda: Case(ours, self._s3cache(f"miss-{self._disks}"), hit=False),
            REDIS: lambda: Case(replace(request, redis=True), redis),
            MEGA: lambda: Case(replace(request, load_artifacts=artifacts), {}),
            TORCH: lambda: Case(request, {}, disk="torch"),
            LOCAL: lambda: Case(ours, shared, disk="s3cache", tier="local"),
            S3: lambda: Case(ours, shared, tier="remote"),
        }

    def _s3cache(self, prefix: str) -> dict[str, str]:
        url = self._gateway.url(self._prefix + prefix)
        options = {**self._gateway.options(), **self._trust, "url": url, "strict": "true"}
        return {f"S3CACHE_{name.upper()}": value for name, value in options.items()}

    def start(self, case: Case) -> Training:
        """A fresh process, after checking that it started as the case says."""
        self._disks += 1
        disk = self._root / (case.disk or f"empty-{self._disks}")
        environment = {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PYTHONPATH": str(ROOT),
            **case.environment,
        }
        for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
            (disk / name.lower()).mkdir(parents=True, exist_ok=True, mode=0o700)
            environment[name] = str(disk / name.lower())
        training = Training(case.request, environment)
        answer = training.answer
        tiers = answer["tiers"]
        if case.request.ranks > 1 and tiers in (["local"], ["local", "remote"]):
            tiers = ["remote"]  # ranks share the disk, which was empty when they started
        if answer["hit"] != case.hit or tiers != ([case.tier] if case.tier else []):
            raise SystemExit(f"not what was to be measured: {case} started as {answer}")
        return training

    def run(self, case: Case) -> dict[str, Any]:
        """The answer of a fresh process."""
        with self.start(case) as training:
            return training.answer


def measure(bench: Bench, names: Sequence[str], rounds: int, seed: int) -> Samples:
    """Prepare what the cases start from, and run them all, ``rounds`` times."""
    for name, case in bench.preparations.items():
        if name in names or (name == S3 and LOCAL in names):
            print(f"preparing: {name}", flush=True)
            bench.run(case)
    found: Samples = {
        timed: {name: [] for name in names} for timed in ("first_s", "total_s", "cpu_s")
    }
    for number, order in enumerate(shuffled_rounds(names, rounds, seed), 1):
        for name in order:
            answer = bench.run(bench.cases[name]())
            print(
                f"round {number}: {name}: first step {answer['first_s']:.3f} s, "
                f"from process start {answer['total_s']:.3f} s, CPU {answer['cpu_s']:.3f} s",
                flush=True,
            )
            for timed, samples in found.items():
                samples[name].append(answer[timed])
    return found


def result_of(found: Samples, layers: int, rounds: int) -> Result:
    """The table of first steps, its bars and samples."""
    first, total = found["first_s"], found["total_s"]
    result = Result(
        f"First training step of a GPT ({layers} layers, d={WIDTH})",
        ["started from", "first step", "process start to its end"],
        notes=[
            f"Medians of {rounds} fresh processes each, which took turns.",
            "Loading a Mega-Cache comes before the first step, and is not in its time.",
        ],
        samples={
            f"{name}, {timed}": samples
            for timed, by_case in found.items()
            for name, samples in by_case.items()
        },
    )
    for name in first:
        seconds = [statistics.median(samples[name]) for samples in (first, total)]
        result.rows.append([name, *(f"{each:.2f} s" for each in seconds)])
    for what, timed, above, below, limit in BARS:
        if above in first and below in first:
            ratio = median_ratio(found[timed][above], found[timed][below])
            result.bars.append(Bar(f"{what}, {above} ÷ {below}", ratio, "at most", limit))
    return result


def measure_later(bench: Bench, rounds: int) -> Result:
    """Steps after the first, of two processes that take turns."""
    names = (TORCH, S3)
    found: dict[str, list[float]] = {name: [] for name in names}
    turns: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        with bench.start(bench.cases[TORCH]()) as torch, bench.start(bench.cases[S3]()) as ours:
            both = [(TORCH, torch), (S3, ours)]
            for turn in range(_TURNS):
                for name, training in both if turn % 2 else reversed(both):
                    samples = training.steps_s(_STEPS_A_TURN)
                    found[name] += samples
                    turns[name].append(statistics.median(samples))
        print(f"later steps: round {number} done", flush=True)
    result = Result(
        "Later training steps of the same GPT",
        ["started from", "later steps"],
        notes=[
            f"Medians of {rounds} pairs of processes, which took turns of {_STEPS_A_TURN} steps.",
            "The ratio is that of turns that follow each other.",
        ],
        samples=found,
    )
    for name, samples in found.items():
        result.rows.append([name, f"{1e3 * statistics.median(samples):.1f} ms"])
    ratio = median_ratio(turns[S3], turns[TORCH])
    result.bars.append(Bar(f"later steps, {S3} ÷ {TORCH}", ratio, "at most", LATER_LIMIT))
    return result


def measure_others(root: Path, gateway: Gateway, redis_url: str, options: Any) -> Result:
    """First steps of other jobs: on another machine, and where torch has compiled them."""
    names = (COLD, TORCH, S3)
    result = Result(
        "First training steps of other jobs",
        ["job", *names],
        notes=[f"Medians of {options.rounds} fresh starts; with nothing cached, of one."],
    )
    for job, request in OTHER_JOBS.items():
        bench = Bench(root, gateway, redis_url, Request(began_s=0.0, **request), job)
        if request.get("ranks"):  # DDP's graphs are a bypass to torch, which finds their halves
            bench.cases[TORCH] = lambda case=bench.cases[TORCH]: replace(case(), hit=False)
        cold = bench.run(bench.cases[COLD]())["first_s"]
        found = measure(bench, (TORCH, S3), options.rounds, options.seed)["first_s"]
        found[COLD] = [cold]
        result.samples.update({f"{job}, {name}": samples for name, samples in found.items()})
        result.rows.append([job, *(f"{statistics.median(found[name]):.2f} s" for name in names)])
        ratio = median_ratio(found[S3], found[TORCH])
        result.bars.append(Bar(f"{job}: {S3} ÷ {TORCH}", ratio, "at most", OTHER_LIMIT))
    return result


def measure_cpu(
    root: Path, gateway: Gateway, redis_url: str, options: argparse.Namespace
) -> Result:
    """CPU seconds of a start, at several sizes."""
    names = (EAGER, TORCH, S3)
    result = Result(
        "CPU seconds from the start of the process to the end of the first step",
        ["layers", *names],
        notes=[f"Medians of {options.rounds} fresh processes each, which took turns; one thread."],
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    for layers, limit in CPU_LIMITS.items():
        request = Request(began_s=0.0, layers=layers)
        bench = Bench(root, gateway, redis_url, request, f"cpu {layers}")
        found = measure(bench, names, options.rounds, options.seed)["cpu_s"]
        result.samples.update({f"{layers} layers, {name}": found[name] for name in names})
        result.rows.append(
            [str(layers), *(f"{statistics.median(found[name]):.2f} s" for name in names)]
        )
        ratio = median_ratio(found[S3], found[TORCH])
        result.bars.append(Bar(f"{layers} layers: {S3} ÷ {TORCH}", ratio, "at most", limit))
    return result


def measure_signed(
    root: Path, gateway: Gateway, redis_url: str, options: argparse.Namespace
) -> list[Result]:
    """First steps and the import, where what nobody has signed is not used."""
    key = generate("bench-1")
    readers = {"trusted_keys": key.public_text(), "trust": "require"}
    trust = {**readers, "signing_key": key.secret_text()}
    request = Request(began_s=0.0, layers=options.layers)
    bench = Bench(root, gateway, redis_url, request, "signed", trust)
    names = [name for name in bench.cases if name not in (EAGER, MEGA)]
    names = [name for name in names if not options.only or name in options.only]
    found = measure(bench, names, options.rounds, options.seed)
    first = result_of(found, options.layers, options.rounds)
    first.title += ", where every entry is signed and has to be"
    first.notes.pop()  # of what is not measured here
    environment = {f"S3CACHE_{name.upper()}": value for name, value in readers.items()}
    imported = _import.measure(15, options.seed, environment)
    imported.title += ", where every entry has to be signed"
    return [first, imported]


def main() -> int:
    options = _options()
    gateway = Gateway.from_environment()
    redis_url = os.environ.get("S3CACHE_TEST_REDIS_URL")
    if gateway is None or redis_url is None:
        raise SystemExit("there is no gateway or no Redis: use make bench")
    gateway.create_bucket()
    if options.cpu:
        with tempfile.TemporaryDirectory(prefix="s3cache-bench-") as root:
            results = [measure_cpu(Path(root), gateway, redis_url, options)]
        _show(results)
        return _status(results)
    if options.signed:
        with tempfile.TemporaryDirectory(prefix="s3cache-bench-") as root:
            results = measure_signed(Path(root), gateway, redis_url, options)
        _show(results)
        if options.json:
            _write(options.json, results)
        return _status(results)
    request = Request(began_s=0.0, layers=options.layers)
    with tempfile.TemporaryDirectory(prefix="s3cache-bench-") as root:
        bench = Bench(Path(root), gateway, redis_url, request)
        names = [name for name in bench.cases if not options.only or name in options.only]
        found = measure(bench, names, options.rounds, options.seed)
        results = [result_of(found, options.layers, options.rounds)]
        if {TORCH, S3} <= set(names):
            results.append(measure_later(bench, options.rounds))
        if not options.only:
            results.append(measure_others(Path(root), gateway, redis_url, options))
    _show(results)
    if options.json:
        plot = os.path.splitext(options.json)[0] + ".svg"
        _write(options.json, results, plot=os.path.basename(plot))
        _plot(plot, results[0].title, found["first_s"])
    return _status(results)


def _show(results: Sequence[Result]) -> None:
    for result in results:
        print(f"\n{result.markdown()}", *result.bars, sep="\n")


def _status(results: Sequence[Result]) -> int:
    return int(not all(bar.met for result in results for bar in result.bars))


def _write(path: str, results: Sequence[Result], **more: str) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        document = {
            "environment": _environment(),
            "results": [result.as_json() for result in results],
            **more,
        }
        json.dump(document, file, indent=1, ensure_ascii=False)
        file.write("\n")


def _plot(path: str, title: str, first_s: Mapping[str, list[float]]) -> None:
    seconds = {name: statistics.median(samples) for name, samples in first_s.items()}
    with open(path, "w", encoding="utf-8") as file:
        file.write(horizontal_bars(f"{title}, seconds", seconds, emphasised={LOCAL, S3}))


def _environment() -> dict[str, str | int | None]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in ("torch", "aioboto3")},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="some of the cases, as printed")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of the start alone")
    parser.add_argument("--signed", action="store_true", help="where every entry has to be")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="docs/benchmarks/warm_start.json", help="'' for none")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
