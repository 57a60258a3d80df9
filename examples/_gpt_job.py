"""The training job of a machine in the GPT demo: plain PyTorch, and a call to turn s3cache on.

It prints one JSON object per line for each event; :mod:`examples.gpt_demo` reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from typing import Any

import s3cache

_SEED = 1865


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--began-s", type=float, required=True, help="on the monotonic clock")
    options = parser.parse_args()

    # Before torch is imported, so that the connection to the bucket is made meanwhile.
    cache = s3cache.enable()
    train(options.layers, options.steps, options.began_s)
    if s3cache.active() is None:
        raise SystemExit("this torch is not supported, see the warning")
    cache.flush()
    stats = cache.stats()
    emit(
        "cache",
        hits=dict(stats.hits),
        misses=sum(stats.misses.values()),
        time_saved_s=stats.time_saved_s,
        uploaded_bytes=stats.uploaded_bytes,
        downloaded_bytes=stats.downloaded_bytes,
        recalled=stats.features["recall"]["recalled"],
        traced=stats.features["recall"]["traced"],
    )


def train(layers: int, steps: int, began_s: float) -> None:
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # NumPy is not needed
    import torch

    from examples._gpt import GPT, batches, encoded_book

    # Without it, threads add the gradients of characters up in varying order.
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(_SEED)
    book, vocabulary = encoded_book()
    model = GPT(vocabulary, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    compiled = torch.compile(model)

    for step, (text, following) in zip(range(steps), batches(book, _SEED), strict=False):
        started_s = time.monotonic()
        loss = compiled(text, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        now_s = time.monotonic()
        if step == 0:
            emit("first", step_s=now_s - started_s, since_start_s=now_s - began_s)
        emit("step", loss=float(loss.detach()).hex())


def emit(what: str, **details: Any) -> None:
    os.write(1, json.dumps({"what": what, **details}).encode() + b"\n")


if __name__ == "__main__":
    main()
