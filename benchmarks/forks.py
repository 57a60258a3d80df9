"""Measure the time of a fork while S3 clients are made, and count the children that hang.

Two kinds of processes take turns: one waits for the background threads before it forks, as s3cache
does, and the other does not. Each makes clients, one after the other, and forks without pause. The
child makes a TLS context, as any HTTPS client does, and hangs if it inherited a lock of OpenSSL.

    python benchmarks/forks.py [--rounds 3] [--seconds 20]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import ssl
import statistics
import subprocess
import sys
import time

from s3cache import Cache
from s3cache.util import threads

# How long a fork waits for other threads, in seconds.
WAYS = {"waits": 10.0, "does not": 0.0}
HANGS_S = 4  # a child that takes longer hangs


def fork_without_pause(seconds: float) -> tuple[list[float], int]:
    """Fork for ``seconds``; return the time of each fork and the number of hung children."""
    took: list[float] = []
    hung = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cache = Cache.open(
            url="s3://bucket/prefix",
            endpoint_url="https://127.0.0.1:1",  # no server listens there
            access_key="key",
            secret_key="secret",
            region="us-east-1",
            local=False,
            lookup_timeout_s=0.01,
        )
        cache.lookup("key")  # times out, but the client is still made
        children = []
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            began = time.perf_counter()
            child = os.fork()
            if child == 0:
                signal.alarm(HANGS_S)
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                os._exit(0)
            took.append(time.perf_counter() - began)
            children.append(child)
        hung += sum(os.waitpid(child, 0)[1] != 0 for child in children)
        cache.close(0.1)
    return took, hung


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="seconds of each process")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        threads.LIMIT_S = WAYS[options.way]
        print(json.dumps(fork_without_pause(options.seconds)), flush=True)
        os._exit(0)

    took: dict[str, list[float]] = {way: [] for way in WAYS}
    hung = dict.fromkeys(WAYS, 0)
    for _ in range(options.rounds):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--seconds", str(options.seconds)]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            times, hanging = json.loads(done.stdout)
            took[way] += times
            hung[way] += hanging
    print("| a fork | children | hung | median | 99 of 100 within | longest |")
    print("| --- | --- | --- | --- | --- | --- |")
    for way, times in took.items():
        slow = statistics.quantiles(times, n=100)[-1]
        cells = (f"{1e3 * each:.1f} ms" for each in (statistics.median(times), slow, max(times)))
        print(f"| {way} | {len(times)} | {hung[way]} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
