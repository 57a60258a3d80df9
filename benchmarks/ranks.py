"""Measure the first start of a job on one machine, all ranks together: ``make bench-ranks``.

The ranks train one step of the GPT of ``make bench`` with DDP (gloo), from an empty disk and an
empty store. The cases take turns: torch alone, s3cache, and s3cache without waits for other ranks
(``S3CACHE_WAIT_S=0``). A last case starts with the store that s3cache has filled. A single rank
runs without DDP. CPU seconds are those of all processes of a job, compilers and their workers
included. With ``--nodes``, the ranks are spread over machines with separate disks; the bucket is
Ceph's if a gateway is running.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from _harness import Bar, Gateway, Result, finish, in_fresh_process, median_ratio
from _start import ROOT

from s3cache.util.text import counted

ALONE, OURS, UNSHARED, WARM = "torch alone", "s3cache", "s3cache, none waits", "s3cache, warm store"
_ONE = "one rank: "
_PR_SET_CHILD_SUBREAPER = 36
_Samples: TypeAlias = "dict[str, dict[str, list[float]]]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--nodes", type=int, default=1, help="machines, each with its own disk")
    parser.add_argument("--json", help="file for the samples")
    options = parser.parse_args()
    if gateway := Gateway.from_environment():
        gateway.create_bucket()
    # The ranks, the nodes, and the variables if s3cache is on.
    cases: dict[str, tuple[int, int, dict[str, str] | None]] = {
        ALONE: (options.ranks, options.nodes, None),
        OURS: (options.ranks, options.nodes, {}),
        UNSHARED: (options.ranks, options.nodes, {"S3CACHE_WAIT_S": "0"}),
        WARM: (options.ranks, options.nodes, {}),
        _ONE + ALONE: (1, 1, None),
        _ONE + OURS: (1, 1, {}),
    }
    samples: _Samples = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            for name, (ranks, nodes, variables) in cases.items():
                store = [*cases].index(OURS if name == WARM else name)
                job = {"ranks": ranks, "layers": options.layers, "nodes": nodes}
                answer = _run(Path(folder), f"store-{store}", job, variables)
                print(f"round {number + 1}, {name}: {answer}", flush=True)
                for key, value in answer.items():
                    samples[name][key].append(value)
    result = _result(options.ranks, options.nodes, samples)
    return finish([result], options.json, {"cpus": os.cpu_count()})


def _result(ranks: int, nodes: int, samples: _Samples) -> Result:
    result = Result(
        f"The first start of {ranks} ranks on {counted(nodes, 'machine')}",
        ("", "CPU seconds", "seconds", "graphs lowered", "uploads"),
    )
    for name, found in samples.items():
        cpu_s, wall_s, lowered, uploaded = (statistics.median(each) for each in found.values())
        uploads = "" if name.endswith(ALONE) else f"{uploaded:.0f}"
        result.rows.append((name, f"{cpu_s:.1f}", f"{wall_s:.1f}", f"{lowered:.0f}", uploads))
        result.samples |= {f"{name}: {key}": values for key, values in found.items()}
    ours, alone = (statistics.median(samples[name]["lowered"]) for name in (OURS, ALONE))
    cpu = {name: found["cpu_s"] for name, found in samples.items()}
    of_all = 0.85 if nodes == 1 else 0.45
    by_alone = median_ratio(cpu[OURS], cpu[ALONE])
    of_one = median_ratio(cpu[_ONE + OURS], cpu[_ONE + ALONE])
    result.bars = [
        Bar("graphs lowered by all ranks, by those of one", ours / (alone / ranks), "at most", 1),
        Bar("CPU of all ranks, by torch alone", by_alone, "at most", of_all),
        Bar("CPU of one rank, by torch alone", of_one, "at most", 1.02),
    ]
    return result


def _run(
    folder: Path, store: str, job: dict[str, int], variables: dict[str, str] | None
) -> dict[str, float]:
    """Run a job on empty machines, in a process that waits for all its descendants."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}",
        "HOME": tempfile.mkdtemp(dir=folder),
        "OMP_NUM_THREADS": "1",
        **(variables or {}),
    }
    if variables is not None:
        environment["S3CACHE_URL"] = f"file://{folder / store}?create=1"
        if gateway := Gateway.from_environment():
            place = f"{folder.name.replace('_', '-')}-{store}".lower()
            options = {"url": gateway.url(place), **gateway.options()}
            environment |= {f"S3CACHE_{name.upper()}": value for name, value in options.items()}
    return in_fresh_process(__file__, {**job, "is_on": variables is not None}, environment)


def _job(ranks: int, layers: int, nodes: int, is_on: bool) -> dict[str, float]:
    """Run the ranks, and wait for all their descendants, orphans included."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    began = time.monotonic()
    processes = []
    here = ranks // nodes
    request = {"began_s": began, "layers": layers, "ranks": ranks, "s3cache": is_on}
    command = [sys.executable, str(ROOT / "benchmarks/_first_step.py"), json.dumps(request)]
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank % here}
        place |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here}
        machine = Path(os.environ["HOME"], f"node-{rank // here}")
        machine.mkdir(exist_ok=True)
        environment = {**os.environ, "HOME": str(machine), "TMPDIR": str(machine)}
        if ranks > 1:
            environment |= {**meeting, **{name: str(value) for name, value in place.items()}}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    answers = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    wall_s = time.monotonic() - began
    assert not any(process.returncode for process in processes)
    with suppress(ChildProcessError):
        while True:  # orphans of the ranks
            os.wait()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    totals = {key: sum(answer[key] for answer in answers) for key in ("lowered", "uploaded")}
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"cpu_s": round(cpu_s, 2), "wall_s": round(wall_s, 2), **totals}


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        print(json.dumps(_job(**json.loads(sys.argv[1]))), flush=True)
    else:
        sys.exit(main())
