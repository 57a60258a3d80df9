"""A fresh process that trains a GPT and reports the seconds of the first step and of later ones.

Run it as a program with a request as JSON (see :class:`Request`). It prints its answer, or its
error, as JSON. Each line of its input is a number of further steps: it runs them, and prints their
seconds as JSON.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LAYERS = 6
WIDTH = 128
_SEED = 0


@dataclass(frozen=True)
class Request:
    """The work of one process.

    Attributes:
        began_s: time just before the process was started, on the monotonic clock.
        layers: number of layers of the model.
        ranks: processes that train it together with DDP; the environment has this one's rank.
        compiled: whether to use ``torch.compile``.
        s3cache: whether to turn it on, with its settings from the environment.
        load_artifacts, save_artifacts: files for torch's Mega-Cache, or "".
        redis: whether torch may import the packages of its remote caches.
    """

    began_s: float
    layers: int = LAYERS
    ranks: int = 1
    compiled: bool = True
    s3cache: bool = False
    load_artifacts: str = ""
    save_artifacts: str = ""
    redis: bool = False


def started(request: Request) -> tuple[dict[str, Any], Callable[[], float]]:
    """Run the first step; return the answer, and a function that returns the seconds of a step."""
    if not request.redis:
        sys.modules.update(dict.fromkeys(("redis", "opentelemetry")))
    if request.s3cache:
        import s3cache

        cache = s3cache.enable()
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # NumPy is not needed
    import torch

    from examples._gpt import GPT, batches, encoded_book

    torch.manual_seed(_SEED)
    book, vocabulary = encoded_book()
    model: Any = GPT(vocabulary, request.layers, WIDTH)
    if request.ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    data = batches(book, _SEED)
    if request.load_artifacts:
        with open(request.load_artifacts, "rb") as file:
            torch.compiler.load_cache_artifacts(file.read())
    forward = torch.compile(model) if request.compiled else model

    def step_s() -> float:
        text, following = next(data)
        started_s = time.perf_counter()
        forward(text, following).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started_s

    before_cpu_s = time.process_time()
    answer: dict[str, Any] = {"first_s": step_s()}
    answer["total_s"] = time.monotonic() - request.began_s
    answer["cpu_s"] = time.process_time()
    answer["first_cpu_s"] = answer["cpu_s"] - before_cpu_s
    answer |= {"hit": None, "traced": 0, "tiers": [], "lowered": 0, "uploaded": 0}
    if request.compiled:
        counters = torch._dynamo.utils.counters
        asked = counters["aot_autograd"]
        # DDP splits the model into several graphs, which torch alone does not look up.
        answer["hit"] = bool(asked["autograd_cache_hit"]) and not asked["autograd_cache_miss"]
        answer["traced"] = counters["stats"]["unique_graphs"]
        # torch counts each FX graph; those that did not hit are lowered.
        of_fx = counters["inductor"]
        answer["lowered"] = of_fx["fxgraph_cache_miss"] + of_fx["fxgraph_cache_bypass"]
    if request.s3cache:
        cache.flush()
        answer["uploaded"] = cache.stats().uploaded
        answer["tiers"] = sorted(tier for tier, count in cache.stats().hits.items() if count)
    if request.save_artifacts:
        data_and_info = torch.compiler.save_cache_artifacts()
        assert data_and_info is not None
        with open(request.save_artifacts, "wb") as file:
            file.write(data_and_info[0])
    return answer, step_s


def main() -> None:
    try:
        answer, step_s = started(Request(**json.loads(sys.argv[1])))
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        print(json.dumps({"error": lines[0]}), flush=True)
        raise
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        print(json.dumps([step_s() for _ in range(int(line))]), flush=True)


if __name__ == "__main__":
    main()
