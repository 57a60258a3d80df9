"""Run processes at full speed under random faults; report lost and wrong entries, times and growth.

    python -m tests.soak [--seconds 1800] [--seed 0] [--page docs/reliability.md]

Uses the Ceph RGW that ``infra/rgw/run.sh`` starts, and kills and restarts it in between. Without a
Ceph RGW, it uses a moto server that is never killed. Exits with status 1 if an entry was lost or
wrong, or a process failed or grew. ``--page`` names the page for the table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.render import fill
from s3cache.store import S3Options
from s3cache.testing import MotoServer
from tests.soak.run import MACHINES, PROCESSES, Results, soak
from tests.support.buckets import moto_place, rgw_place

RESTART = Path(__file__).parents[2] / "infra" / "rgw" / "restart.sh"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        place, restart, server_name = _server(stack)
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="s3cache-soak-")))
        port = urlsplit(str(place.endpoint_url)).port or 80
        where = {name: getattr(place, name) for name in ("region", "access_key", "secret_key")}
        where["url"] = f"s3://{place.bucket}/soak"
        results = soak(root, port, where, restart, options.seconds, options.seed)
    text = table(results, server_name, options.seed)
    print(text)
    if options.page:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(fill(page, "bench:soak", text), encoding="utf-8")
    bad = list(complaints(results))
    for complaint in bad:
        print(f"BAD: {complaint}")
    return int(bool(bad))


def _server(stack: ExitStack) -> tuple[S3Options, Path | None, str]:
    if place := rgw_place("s3cache-soak"):
        return place, RESTART, "Ceph RGW"
    moto = stack.enter_context(MotoServer())
    return moto_place(moto), None, "a moto server (no Ceph RGW was available)"


# -- the results as a table


def complaints(results: Results) -> Iterator[str]:
    """Yield a message for each failure."""
    if results.lost:
        yield f"lost {len(results.lost)} of {results.acknowledged}, as {results.lost[:5]}"
    if results.wrong:
        yield f"wrong: {results.wrong[:5]}"
    for each in results.growth:
        if not each.is_flat:
            yield f"{each.what} grew from {each.early:g} to {each.late:g}"
    yield from (f"a process failed: {error}" for error in results.errors[:3])


def table(results: Results, server: str, seed: int) -> str:
    counts, entries = results.counts, results.acknowledged
    minutes, misses = f"{results.seconds / 60:.0f} minutes", _counts_in_words(results.misses)
    lines = [
        f"{PROCESSES} processes, {MACHINES} machines, {server}, {minutes}, seed {seed}.",
        "",
        "| | |",
        "|---|---|",
        f"| saves that were acknowledged | {counts['saved']:,}, of {entries:,} entries |",
        f"| saves that were not | {counts['refused']:,} |",
        f"| lookups | {counts['hit']:,} hits, {counts['miss']:,} misses ({misses}) |",
        f"| **lost** | {len(results.lost)} |",
        f"| **wrong** | {len(results.wrong)} |",
        *(
            f"| {kind}: slowest, and 99 of 100 | {results.slowest_ms[kind]:,.0f} ms, "
            f"{results.p99_ms[kind]:,.0f} ms |"
            for kind in sorted(results.slowest_ms)
        ),
        f"| what happened | {_counts_in_words(results.happened)} |",
        *(
            f"| {_NAMES[each.what]}: early, late, most | {each.early:,.0f}, {each.late:,.0f}, "
            f"{each.most:,.0f} |"
            for each in results.growth
        ),
        "",
    ]
    return "\n".join(lines)


_NAMES = {
    "memory_mib": "memory of a process (MiB)",
    "threads": "threads",
    "sockets": "sockets",
    "files": "other open files",
}


def _counts_in_words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "none"


if __name__ == "__main__":
    sys.exit(main())
