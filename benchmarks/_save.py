"""Measure how long ``save`` blocks its caller, with the network up, down and silent.

Run as a program, it is the fresh process of one condition.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from _harness import (
    ENTRY_BYTES,
    Bar,
    Gateway,
    Result,
    compiled_graph,
    in_fresh_process,
    key_of,
    percentile,
)

from s3cache import Cache, frame

P99_AT_MOST_S = 0.025
# The client opens in the background; a graph takes longer than this to compile.
_COMPILING_S = 2.0


def measure(gateway: Gateway | None, saves: int = 300) -> Result:
    result = Result(
        f"Save of {ENTRY_BYTES / 1e6:.1f} MB, time on the calling thread",
        ["network", "call", "p50", "p99", "max"],
        notes=[
            f"{saves} calls of each kind, by turns, in a fresh process for each condition.",
            "disk: the same bytes written to a new file and flushed to the disk, for comparison.",
        ],
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        conditions = {"down": _endpoint(server)}  # closed below
    with (
        tempfile.TemporaryDirectory() as root,
        # The kernel accepts connections, and nothing answers.
        socket.create_server(("127.0.0.1", 0), backlog=1024) as silent,
    ):
        conditions["black-holed"] = _endpoint(silent)
        if gateway is not None:
            conditions = {"up": gateway, **conditions}
        for network, server in conditions.items():
            request = {
                "options": server.options(),
                "url": server.url(f"save-{network}"),
                "local_dir": os.path.join(root, network),
                "saves": saves,
            }
            for call, seconds in in_fresh_process(__file__, request).items():
                _add_rows(result, network, call, seconds)
    if gateway is not None:
        gateway.empty()
    return result


def _endpoint(server: socket.socket) -> Gateway:
    return Gateway(f"http://127.0.0.1:{server.getsockname()[1]}", "unused", "unused")


def _add_rows(result: Result, network: str, call: str, seconds: list[float]) -> None:
    p99 = percentile(seconds, 99)
    figures = (statistics.median(seconds), p99, max(seconds))
    result.rows.append([network, call, *(f"{figure * 1e3:.1f} ms" for figure in figures)])
    result.samples[f"{network}, {call}, s"] = seconds
    if call == "save":
        what = f"p99 of {call}, network {network}"
        result.bars.append(Bar(what, p99 * 1e3, "at most", P99_AT_MOST_S * 1e3, "ms"))


def _condition(
    url: str, options: dict[str, Any], local_dir: str, saves: int
) -> dict[str, list[float]]:
    rng = random.Random(0)
    times: dict[str, list[float]] = {"save": [], "encode and save": [], "disk": []}

    @contextlib.contextmanager
    def timed(call: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        times[call].append(time.perf_counter() - started)

    cache = Cache.open(url, local_dir=local_dir, **options)
    time.sleep(_COMPILING_S)
    sections = compiled_graph(rng, ENTRY_BYTES)
    for number in range(saves):
        key, other = key_of(2 * number), key_of(2 * number + 1)
        sections["kernel0"] = rng.randbytes(len(sections["kernel0"]))
        entry = frame.encode(kind="bench", key=key, sections=sections, codec="none")
        with timed("save"):
            saved = cache.save(key, entry)
        assert saved.durable, saved
        with timed("encode and save"):
            cache.save(other, frame.encode(kind="bench", key=other, sections=sections))
        with timed("disk"):
            _write_durably(local_dir, entry)
    return times


def _write_durably(root: str, data: bytes) -> None:
    path = os.path.join(root, secrets.token_hex(8))
    with open(path, "wb", buffering=0) as file:
        file.write(data)
        os.fdatasync(file.fileno())
    os.unlink(path)


if __name__ == "__main__":
    print(json.dumps(_condition(**json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # without waiting for uploads
