"""Measure the wait of a compiling thread for 40 graphs, with 50 ms of round trip.

    PYTHONPATH=. .venv/bin/python benchmarks/jobs.py

A process saves the graphs. Then processes with an empty disk look all of them up, one after another
or 20 ms apart (torch takes longer to trace a graph). A program turns the cache on, then imports
torch and its compiler; or it imports torch, turns the cache on, then imports the compiler. For
comparison, another program looks graphs up as soon as the cache is on: the S3 client is still being
imported then, and no real program has torch's compiler so early. Only the lookups are timed.

The bucket is moto's. A proxy delays every byte by 25 ms in each direction, and every new connection
by 50 ms. Server and proxy are separate processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace

from _harness import Bar, Result, finish, in_fresh_process, key_of

import s3cache
from s3cache import frame
from s3cache.testing import MotoBucket, MotoServer

GRAPHS, ROUND_TRIP_S, TRACED_S, ENTRY_BYTES = 40, 0.05, 0.02, 50_000
WAITED_AT_MOST_S = 0.3
KEYS = [key_of(number) for number in range(GRAPHS)]
# By program: the import after the cache is on, and the time of tracing before each lookup.
PROGRAMS = {
    f"{imported} imported, then {gap}": (imported, traced_s)
    for imported in ("torch", "the compiler", "nothing")
    for gap, traced_s in (("one after another", 0.0), ("20 ms apart", TRACED_S))
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file for the samples")
    options = parser.parse_args()
    return finish([_measure(options.rounds)], options.json, {})


def _measure(rounds: int) -> Result:
    waited = {(name, on): list[float]() for name in PROGRAMS for on in (False, True)}
    with (
        MotoServer() as server,
        tempfile.TemporaryDirectory() as root,
        subprocess.Popen(
            [sys.executable, __file__, "--proxy", str(server.port)], stdout=subprocess.PIPE
        ) as proxy,
    ):
        assert proxy.stdout is not None
        bucket = replace(
            server.make_bucket(), endpoint_url=f"http://127.0.0.1:{int(proxy.stdout.readline())}"
        )
        _run(root, bucket, "nothing", 0.0, on=True, saves=True)
        for _ in range(rounds):
            for (name, on), times in waited.items():
                times.append(_run(root, bucket, *PROGRAMS[name], on=on))
        proxy.terminate()
    return _result(waited)


def _run(
    root: str, bucket: MotoBucket, imported: str, traced_s: float, *, on: bool, saves: bool = False
) -> float:
    """Run the program on a fresh machine; return the seconds of its lookups."""
    with tempfile.TemporaryDirectory(dir=root) as home:
        environment = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
        environment |= {"HOME": home, "AWS_EC2_METADATA_DISABLED": "true"}
        program = {"imported": imported, "traced_s": traced_s, "on": on, "saves": saves}
        answer = in_fresh_process(__file__, {"bucket": asdict(bucket), **program}, environment)
        return float(answer["elapsed_s"])


def _program(
    bucket: dict[str, str], imported: str, traced_s: float, on: bool, saves: bool
) -> float:
    if imported == "the compiler":
        import torch
    url = f"s3://{bucket.pop('name')}/jobs"
    cache = s3cache.enable(url, job_profiles=on, **bucket)
    if imported != "nothing":
        import torch._dynamo  # noqa: F401
    if saves:
        for key in KEYS:
            noise = random.Random(key).randbytes(ENTRY_BYTES)
            cache.save(key, frame.encode(kind="bench", key=key, sections={"0": noise}))
        while not cache.engine.parts["job_profile"].is_known:
            time.sleep(0.01)
        assert cache.flush().complete
        return 0.0
    elapsed_s = 0.0
    for key in KEYS:
        time.sleep(traced_s)
        elapsed_s += cache.lookup(key).elapsed_s
    assert sum(cache.stats().hits.values()) == GRAPHS
    return elapsed_s


async def _proxy(server_port: int) -> None:
    """Print a port, and serve there, a round trip away from the server."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            loop.call_later(ROUND_TRIP_S / 2, writer.write, data)
        loop.call_later(ROUND_TRIP_S / 2, writer.close)

    async def connected(down: asyncio.StreamReader, up: asyncio.StreamWriter) -> None:
        await asyncio.sleep(ROUND_TRIP_S)  # the time to open a connection
        reader, writer = await asyncio.open_connection("127.0.0.1", server_port)
        await asyncio.gather(pump(down, writer), pump(reader, up), return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1_000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _result(waited: dict[tuple[str, bool], list[float]]) -> Result:
    title = f"Waited for {GRAPHS} graphs, {ROUND_TRIP_S * 1e3:.0f} ms of round trip"
    result = Result(title, ["", "without a profile", "with a job profile", "most"])
    for name in PROGRAMS:
        without, with_it = (statistics.median(waited[name, on]) for on in (False, True))
        most = max(waited[name, True])
        result.rows.append([name, *(f"{each:.3f} s" for each in (without, with_it, most))])
        if PROGRAMS[name][0] != "nothing":
            result.bars.append(Bar(name, with_it, "at most", WAITED_AT_MOST_S, "s"))
    result.samples = {f"{name}, {on}": times for (name, on), times in waited.items()}
    return result


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--proxy", port]:
            asyncio.run(_proxy(int(port)))
        case [program] if program.startswith("{"):
            print(json.dumps({"elapsed_s": _program(**json.loads(program))}))
        case _:
            sys.exit(main())
