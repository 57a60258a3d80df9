"""One process on a machine of the storage demo: a job that needs compiled graphs.

It prints one JSON object per line for each event; :mod:`examples.storage_demo` reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

from examples._workload import Graph, graphs
from s3cache import Cache, Settings
from s3cache.cache import Hit, Saved
from s3cache.stats import TransferEvent
from s3cache.store import Buffer, Store, WrapperStore, open_store

# An uplink so slow that uploads fall behind saves.
_SLOW_LATENCY_S = 0.02
_SLOW_BYTES_PER_S = 6e6
_SLOW_CONNECTIONS = 2

_FLUSH_TIMEOUT_S = 30.0


class _SlowStore(WrapperStore):
    """A store behind that uplink, which delays uploads."""

    async def put(self, key: str, data: Buffer, **options: Any) -> None:
        await asyncio.sleep(_SLOW_LATENCY_S + memoryview(data).nbytes / _SLOW_BYTES_PER_S)
        await super().put(key, data, **options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--graphs", type=int, required=True)
    parser.add_argument("--prefetch", type=int, default=0)
    parser.add_argument("--slow-uplink", action="store_true")
    options = parser.parse_args()
    wanted = graphs(options.graphs)

    cache = open_cache(options.url, slow_uplink=options.slow_uplink)
    cache.subscribe(emit_transfer)
    cache.start()
    if options.prefetch:
        cache.prefetch(graph.key for graph in wanted[: options.prefetch]).wait()
        emit("prefetched")
    for graph in wanted:
        use(cache, graph)
    emit("closed", remaining=cache.close(_FLUSH_TIMEOUT_S).remaining)


def open_cache(url: str, *, slow_uplink: bool) -> Cache:
    """Open the cache like ``Cache.open(url)``, optionally behind a slow uplink."""
    if not slow_uplink:
        return Cache(Settings(url=url), open_remote=lambda: open_store(url), identity=url)

    def slow_store() -> Store:
        return _SlowStore(open_store(url))

    settings = Settings(url=url, upload_concurrency=_SLOW_CONNECTIONS)
    return Cache(settings, open_remote=slow_store, identity=url)


def use(cache: Cache, graph: Graph) -> None:
    """Look a graph up; after a miss, compile and save it."""
    found = cache.lookup(graph.key)
    if isinstance(found, Hit):
        emit(
            "hit",
            key=graph.key,
            tier=found.tier,
            elapsed_s=found.elapsed_s,
            intact=graph.made(found.entry),
        )
        return
    emit("miss", key=graph.key, reason=str(found.reason))
    saved = cache.save(graph.key, graph.compile())
    if isinstance(saved, Saved):
        emit("saved", key=graph.key, durable=saved.durable)
    else:
        emit("refused", key=graph.key, reason=str(saved.reason))


def emit_transfer(event: TransferEvent) -> None:
    key = event.name.rpartition("/")[2].partition(".")[0]
    emit(event.direction, key=key, step=event.step, size=event.size)


def emit(what: str, **details: Any) -> None:
    # One write: threads do not mix their lines, and printed lines survive a kill.
    os.write(1, json.dumps({"what": what, **details}).encode() + b"\n")


if __name__ == "__main__":
    main()
