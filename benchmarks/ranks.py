"""Measure the first start of a job on one machine, all ranks together: ``make bench-ranks``.

The ranks train one step of the GPT of ``make bench`` with DDP (gloo), from an empty disk and an
empty store. The cases take turns: torch alone, s3cache, and s3cache without waits for other ranks
(``S3CACHE_WAIT_S=0``). A last case starts with the store that s3cache has filled. A single rank
runs without DDP. CPU seconds are those of all processes of a job, compilers and their workers
included. With ``--nodes``, the ranks are spread over machines with separate disks; the bucket is
Ceph's if a gateway is running.

With ``--gpu``, each rank compiles for its own stand-in for a GPU (``tests/gpu/standin.py``).
Triton's compiler and ``ptxas`` run, and torch has no lock that lets ranks share their output. There
are not gradients to exchange, so the ranks run without DDP.
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
from pathlib import Path
from typing import Any

from _harness import Bar, Gateway, Result, all_met, write_results
from _start import ROOT

from s3cache.util.text import counted

ALONE, OURS, UNSHARED, WARM = "torch alone", "s3cache", "s3cache, none waits", "s3cache, warm store"
_ONE = "one rank: "
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--nodes", type=int, default=1, help="machines, each with its own disk")
    parser.add_argument("--gpu", action="store_true", help="compile for stand-ins for GPUs")
    parser.add_argument("--cases", help="cases to run, separated by commas")
    parser.add_argument("--json", type=Path, help="file for the samples")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(_rank(**json.loads(options.rank))), flush=True)
        return 0
    if options.job:
        print(json.dumps(_job(*json.loads(options.job))), flush=True)
        return 0
    cases = {
        ALONE: (options.ranks, False, {}),
        OURS: (options.ranks, True, {}),
        UNSHARED: (options.ranks, True, {"S3CACHE_WAIT_S": "0"}),
        WARM: (options.ranks, True, {}),
        _ONE + ALONE: (1, False, {}),
        _ONE + OURS: (1, True, {}),
    }
    if options.cases:
        cases = {name: case for name, case in cases.items() if name in options.cases.split(",")}
    if gateway := Gateway.from_environment():
        gateway.create_bucket()
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, (ranks, is_on, more) in cases.items():
                store = OURS if name == WARM else name
                nodes = options.nodes if ranks > 1 else 1
                answer = _run(
                    Path(folder),
                    name,
                    store,
                    [ranks, options.layers, is_on, nodes, options.gpu],
                    more,
                )
                print(f"round {number + 1}, {name}: {answer}", flush=True)
                for key, value in answer.items():
                    found[name][key].append(value)
    result = _result(options.ranks, options.nodes, found, 0.4 if options.gpu else None)
    print(f"\n{result.markdown()}")
    for bar in result.bars:
        print(bar)
    if options.json:
        write_results(str(options.json), {"cpus": os.cpu_count()}, [result])
    return 0 if all_met([result]) else 1


def _result(
    ranks: int, nodes: int, found: dict[str, dict[str, list[float]]], most: float | None
) -> Result:
    middle = {
        name: {key: statistics.median(values) for key, values in samples.items()}
        for name, samples in found.items()
    }

    def ratio(name: str, to: str) -> float | None:
        if not {name, to} <= found.keys():
            return None
        pairs = zip(found[name]["cpu_s"], found[to]["cpu_s"], strict=True)
        return statistics.median(one / other for one, other in pairs)

    result = Result(
        f"The first start of {ranks} ranks on {counted(nodes, 'machine')}",
        ("", "CPU seconds", "seconds", "graphs lowered", "uploads"),
    )
    for name, row in middle.items():
        result.rows.append(
            (
                name,
                f"{row['cpu_s']:.1f}",
                f"{row['wall_s']:.1f}",
                f"{row['lowered']:.0f}",
                f"{row['uploaded']:.0f}" if "s3cache" in name else "",
            )
        )
    lowered = middle.get(OURS, {}).get("lowered")
    expected = middle.get(ALONE, {}).get("lowered", 0.0) / ranks
    result.bars = [
        Bar(
            "graphs lowered by all ranks, by those of one",
            lowered / expected if lowered and expected else None,
            "at most",
            1,
        ),
        Bar(
            "CPU of all ranks, by torch alone",
            ratio(OURS, ALONE),
            "at most",
            most or (0.85 if nodes == 1 else 0.45),
        ),
        Bar("CPU of one rank, by torch alone", ratio(_ONE + OURS, _ONE + ALONE), "at most", 1.02),
    ]
    result.samples = {
        f"{name}: {key}": values for name, rows in found.items() for key, values in rows.items()
    }
    return result


def _run(
    folder: Path, name: str, store: str, job: list[Any], more: dict[str, str]
) -> dict[str, float]:
    """Run a job on empty machines, in a process that waits for all its descendants."""
    machine = Path(tempfile.mkdtemp(dir=folder))
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}",
        "HOME": str(machine),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    if job[2]:
        place = f"{folder.name}-{store.replace(' ', '-').replace(',', '')}".lower().replace(
            "_", "-"
        )
        environment["S3CACHE_URL"] = f"file://{folder / place}?create=1"
        if gateway := Gateway.from_environment():
            options = {"url": gateway.url(place), **gateway.options()}
            environment |= {f"S3CACHE_{name.upper()}": value for name, value in options.items()}
    done = subprocess.run(
        [sys.executable, __file__, "--job", json.dumps(job)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def _job(ranks: int, layers: int, is_on: bool, nodes: int, gpu: bool) -> dict[str, float]:
    """Run the ranks, and wait for all their descendants, orphans included."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    processes = []
    here = ranks // nodes
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank % here), "WORLD_SIZE": str(ranks)}
        place |= {"LOCAL_WORLD_SIZE": str(here), "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = str(port)
        machine = Path(os.environ["HOME"], f"node-{rank // here}")
        machine.mkdir(exist_ok=True)
        given = json.dumps({"ranks": ranks, "layers": layers, "is_on": is_on, "gpu": gpu})
        command = [sys.executable, __file__, "--rank", given]
        environment = {**os.environ, **(place if ranks > 1 else {})}
        environment |= {"HOME": str(machine), "TMPDIR": str(machine)}
        if gpu:
            environment |= _standin(rank % here)
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    answers = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    wall_s = time.monotonic() - began
    assert not any(process.returncode for process in processes)
    while True:  # orphans of the ranks
        try:
            os.wait()
        except ChildProcessError:
            break
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    losses = {answer["loss"] for answer in answers}
    assert gpu or len(losses) == ranks or ranks == 1, f"ranks have seen the same data: {losses}"
    totals = {key: sum(answer[key] for answer in answers) for key in ("lowered", "uploaded")}
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "wall_s": round(wall_s, 2),
        **totals,
    }


def _standin(index: int) -> dict[str, str]:
    """Return the environment of a process with a stand-in for a GPU."""
    from tests.gpu import standin

    assert not standin.MISSING, standin.MISSING
    found = standin.environment_of(index=index)
    # Workers have no GPU to compile for.
    return {
        **found,
        "PYTHONPATH": os.pathsep.join([found["PYTHONPATH"], os.environ["PYTHONPATH"]]),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def _compile_for_gpu(layers: int) -> None:
    """Compile the forward and backward of one step."""
    import torch

    from examples._gpt import GPT
    from tests.gpu import standin

    with standin.tensors(), torch.device("cuda"):
        model: Any = torch.compile(GPT(64, layers, 128))
        model(torch.zeros(8, 64, dtype=torch.long), torch.zeros(8, 64, dtype=torch.long)).backward()


def _train(ranks: int, layers: int) -> str:
    import torch

    from examples._gpt import GPT, batches, encoded_book

    torch.manual_seed(0)
    book, vocabulary = encoded_book()
    model: Any = GPT(vocabulary, layers, 128)
    rank = 0
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    text, following = next(batches(book, rank))
    loss = torch.compile(model)(text, following)
    loss.backward()
    optimizer.step()
    if ranks > 1:
        torch.distributed.barrier()
    return float(loss).hex()


def _rank(ranks: int, layers: int, is_on: bool, gpu: bool) -> dict[str, Any]:
    """Train one step."""
    if gpu:
        from tests.gpu import standin

        standin.install()
    cache = None
    if is_on:
        import s3cache

        cache = s3cache.enable()
    import torch

    loss = "" if gpu else _train(ranks, layers)
    if gpu:
        _compile_for_gpu(layers)
    uploaded = 0
    if cache is not None:
        cache.flush()
        uploaded = cache.stats().uploaded
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    counts = torch._dynamo.utils.counters["inductor"]
    # torch counts each FX graph as a hit, a miss or a bypass; those that did not hit are lowered.
    lowered = counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
    return {"loss": loss, "lowered": lowered, "uploaded": uploaded}


if __name__ == "__main__":
    sys.exit(main())
