"""``s3cache bench``: how fast the user's own bucket is, and what a warm start saves with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3cache._words import counted
from s3cache.cli._choosing import Url, duration_s, size_bytes
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output, size_text

if TYPE_CHECKING:
    from s3cache.benching import Bench, Times

__all__ = ["bench"]

_SHOWN = {
    "small_put": "put of 4 KiB",
    "small_get": "get of 4 KiB",
    "miss": "get of what is not there",
    "large_put": "put of",
    "large_get": "get of",
}


@grouped(out=Output)
def bench(
    out: Output,
    storage_only: Annotated[
        bool, typer.Option("--storage-only", help="Compile nothing; torch is not needed.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(metavar="N", help="Cold and warm starts, each N times.", min=1)
    ] = 3,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of a large object.")] = "32MB",
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="Leave out tries that would take longer.")
    ] = "5min",
    url: Url = None,
) -> int:
    """Measure the user's own bucket: its storage, and a first step compiled and hit through it.

    A warm start is that of a small model in a fresh process whose disk is empty; a cold one
    compiles it there. Medians of all tries. Everything is written below a prefix of its own,
    s3cache-bench-..., and removed in the end; where the credentials may not delete it is said what
    stays. Exits with 1 if the warm start did not hit.
    """
    from s3cache.benching import Bench

    with out.progress("measured", Bench.tries(0 if storage_only else rounds)) as advance:
        running = Bench(
            url,
            size=size_bytes("--size", size),
            timeout_s=duration_s("--timeout", timeout),
            advance=advance,
        )
        found: dict[str, Any] = {"url": running.store.url, "prefix": running.prefix}
        with _cleaned(running, found):
            storage = running.storage()
            found["storage"] = {name: times.as_dict() for name, times in storage.items()}
            if not storage_only:
                found["warm_start"] = running.warm_start(rounds)
    if out.json:
        out.record(found)
    else:
        _show(out, found, storage)
    return 0 if storage_only or found["warm_start"]["hits"] else 1


@contextmanager
def _cleaned(running: Bench, found: dict[str, Any]) -> Iterator[None]:
    """What was written is removed however it ends, also by Ctrl-C."""
    try:
        try:
            yield
        finally:
            found["removed"], found["left"] = running.clean()
    finally:
        running.close()


def _show(out: Output, found: dict[str, Any], storage: dict[str, Times]) -> None:
    rows = []
    for name, times in storage.items():
        large = f" {size_text(times.size)}" if times.size else ""
        speed = f"{times.mb_s:.0f} MB/s" if times.size else ""
        median = f"{times.median_s * 1000:.1f} ms"
        rows.append((f"{_SHOWN[name]}{large}", median, speed, str(len(times.seconds))))
    out.table(["storage", ">median", ">speed", ">tries"], rows)
    if start := found.get("warm_start"):
        cold, warm = start["cold"], start["warm"]
        rows = [
            (f"compiled, on {start['device']}", f"{cold['median_s']:.2f} s", "", _count(cold)),
            ("hit", f"{warm['median_s']:.2f} s", f"{start['ratio']:.1f}x faster", _count(warm)),
        ]
        out.table(["first step", ">median", ">", ">tries"], rows)
        if not start["hits"]:
            why = ", ".join([*start["misses"], *start["bypasses"]]) or "it looked nothing up"
            out.line(f"the warm start did not hit: {why} (see s3cache doctor)")
    if found["left"]:
        out.line(
            f"{counted(found['left'], 'object')} left below {found['prefix']}: these credentials "
            "may not delete; whoever operates the bucket may remove what is there"
        )
    else:
        out.note(f"what was written is removed ({counted(found['removed'], 'object')})")


def _count(times: dict[str, Any]) -> str:
    return str(len(times["seconds"]))
