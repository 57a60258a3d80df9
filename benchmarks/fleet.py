"""Simulate a fleet that starts at once, on a clock that jumps. It takes minutes.

    PYTHONPATH=.:benchmarks .venv/bin/python benchmarks/fleet.py --json docs/benchmarks/fleet.json

Each rank of each node looks 40 graphs up, one after another. The bucket is empty at first. Leases,
waits and retries are the client's own code. The bucket is in memory: it answers as slowly as S3,
and with 503 SlowDown above 3,500 writes or 5,500 reads a second per prefix. On a node, ranks wait
for the first one, as with claims. Nodes die, or lose the network for a while, at random. A rank
compiles if its wait ends without an entry, or if it cannot reach the bucket.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from _harness import Bar, Result, finish

from s3cache.errors import StoreError, TransientError
from s3cache.features.single_flight.leases import PREFIX, Leases
from s3cache.store import MemoryStore, RetryingStore, RetryPolicy, WrapperStore
from tests.support.virtual import run_virtually

WRITES_A_SECOND, READS_A_SECOND = 3_500, 5_500
BOUND_S, LOAD_S = 600.0, 0.3
CUT = DEAD = 0.01  # the shares of nodes that lose the network, and that die


@dataclass
class Bucket:
    """The bucket that all nodes share, and counts of events."""

    draw: random.Random
    store: MemoryStore = field(default_factory=lambda: MemoryStore("fleet"))
    rates: dict[tuple[str, str], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    slowed: int = 0
    compiles: Counter[int] = field(default_factory=Counter)
    began: dict[int, float] = field(default_factory=dict)
    beyond: list[float] = field(default_factory=list)
    timed_out: int = 0


class Link(WrapperStore):
    """The connection of one node to the bucket."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket.store)
        self._bucket = bucket
        self.is_cut = False

    async def _around(self, verb: Any, key: str, call: Any) -> Any:
        bucket, loop = self._bucket, asyncio.get_running_loop()
        if verb == "atomic_create":
            return True
        # A median of 30 ms, and one request in a hundred takes more than 150.
        await asyncio.sleep(0.03 * bucket.draw.lognormvariate(0, 0.7))
        if self.is_cut:
            await asyncio.sleep(3)
            raise TransientError("no route to host", op=verb)
        prefix = PREFIX if key.startswith(PREFIX) else key.partition("/")[0]
        kind = "write" if verb in ("put", "delete") else "read"
        limit = WRITES_A_SECOND if kind == "write" else READS_A_SECOND
        rate = bucket.rates[prefix, kind]
        second = int(loop.time())
        rate[second] += 1
        if rate[second] > limit:
            bucket.slowed += 1
            raise TransientError("503 SlowDown", op=verb)
        return await call()


class Node:
    """A machine with ranks that look all graphs up."""

    def __init__(self, bucket: Bucket, number: int, compile_s: list[float]) -> None:
        self._bucket, self._compile_s = bucket, compile_s
        self.link = Link(bucket)
        policy = RetryPolicy(4, 120.0, 60.0)
        self._store = RetryingStore(self.link, policy)
        self._draw = random.Random(number)
        self._leases = Leases(self._store, f"node {number}", random.Random(number))
        self._claims: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._local: set[int] = set()

    async def rank(self) -> None:
        for graph in range(len(self._compile_s)):
            await asyncio.sleep(self._draw.uniform(0.2, 2.0))  # tracing
            if graph in self._local or await self._is_there(graph):
                await asyncio.sleep(LOAD_S)
                self._local.add(graph)
                continue
            async with self._claims[graph]:
                if graph not in self._local:
                    await self._lead(graph)
                    self._local.add(graph)

    async def _is_there(self, graph: int) -> bool:
        with suppress(StoreError):
            return await self._is_published(graph)
        return False

    async def _lead(self, graph: int) -> None:
        bucket, loop = self._bucket, asyncio.get_running_loop()
        asked, lease = loop.time(), None
        try:
            leased = await self._leases.take(
                f"graph {graph}", lambda: self._is_published(graph), BOUND_S
            )
        except StoreError:
            pass
        else:
            lease = leased.lease
            bucket.timed_out += leased.timed_out
            if leased.is_remote:
                ideal = max(asked, bucket.began[graph] + self._compile_s[graph])
                bucket.beyond.append(loop.time() - ideal)
                return
        bucket.compiles[graph] += 1
        bucket.began.setdefault(graph, loop.time())
        await asyncio.sleep(self._compile_s[graph])
        asyncio.ensure_future(self._upload(graph, lease))  # noqa: RUF006 - it ends with the node

    async def _is_published(self, graph: int) -> bool:
        return await self._store.head(f"v1/{graph}") is not None

    async def _upload(self, graph: int, lease: Any) -> None:
        ended = None
        if lease is not None:
            ended = asyncio.ensure_future(lease.end(lambda: self._is_published(graph)))
        while True:
            try:
                await self._store.put(f"v1/{graph}", b"entry")
                break
            except StoreError:
                await asyncio.sleep(1)
        if ended is not None:
            await ended


async def _fleet(options: argparse.Namespace, bucket: Bucket) -> int:
    draw = bucket.draw
    compile_s = [draw.uniform(5, 60) for _ in range(options.graphs)]

    async def live(number: int) -> None:
        node = Node(bucket, number, compile_s)
        await asyncio.sleep(draw.uniform(0, 60))
        ranks = [asyncio.ensure_future(node.rank()) for _ in range(options.ranks)]
        fate = draw.random()
        if fate < CUT:
            await asyncio.sleep(draw.uniform(0, 600))
            node.link.is_cut = True
            await asyncio.sleep(draw.uniform(20, 120))
            node.link.is_cut = False
        elif fate < CUT + DEAD:
            await asyncio.sleep(draw.uniform(0, 600))
            for lease in [*node._leases.held]:
                lease.stop()
            for rank in ranks:
                rank.cancel()
            await asyncio.gather(*ranks, return_exceptions=True)
            return
        await asyncio.gather(*ranks)

    work = [asyncio.ensure_future(live(number)) for number in range(options.nodes)]
    # No rank may take longer than one full wait for each graph.
    done, pending = await asyncio.wait(work, timeout=options.graphs * (BOUND_S + 120))
    for task in done:
        task.result()  # raises its error
    return len(pending) * options.ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--graphs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    bucket = Bucket(random.Random(options.seed))
    hung = run_virtually(_fleet(options, bucket))
    compiles = sum(bucket.compiles.values()) / options.graphs
    beyond = sorted(bucket.beyond)
    p50, p99 = beyond[len(beyond) // 2], beyond[int(len(beyond) * 0.99)]
    peaks = {
        f"{prefix} {kind}": max(rate.values()) for (prefix, kind), rate in bucket.rates.items()
    }
    result = Result(
        f"{options.nodes} nodes of {options.ranks} ranks, {options.graphs} graphs",
        ("", "found"),
        [
            ("compiles per graph", f"{compiles:.3f}"),
            ("waiting beyond the first compile: p50", f"{p50:.1f} s"),
            ("p99, longest", f"{p99:.1f} s, {beyond[-1]:.1f} s"),
            *((f"{name}s a second at the peak", f"{peak}") for name, peak in sorted(peaks.items())),
            ("requests that were slowed down", str(bucket.slowed)),
            ("waits that timed out", str(bucket.timed_out)),
            ("ranks that hang", str(hung)),
        ],
    )  # fmt: skip
    reads = max(peak for name, peak in peaks.items() if name.endswith("read"))
    writes = max(peak for name, peak in peaks.items() if name.endswith("write"))
    result.bars = [
        Bar("compiles per graph", compiles, "at most", 1.05),
        Bar("p99 of waiting beyond the first compile", p99, "at most", 5, "s"),
        Bar("reads a second and prefix", reads, "at most", READS_A_SECOND),
        Bar("writes a second and prefix", writes, "at most", WRITES_A_SECOND),
        Bar("ranks that hang", hung, "at most", 0),
    ]
    return finish([result], options.json, {"seed": options.seed})


if __name__ == "__main__":
    sys.exit(main())
