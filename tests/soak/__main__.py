"""Processes at full rate under faults drawn at random: what is lost, wrong, slow, or grows.

    python -m tests.soak [--seconds 1800] [--seed 0] [--page docs/reliability.md]

Uses the Ceph RGW that ``infra/rgw/run.sh`` starts, which is killed and restarted on the way;
without one a moto server, which is not. Ends with 1 if anything was lost or wrong, grew, or failed.
With ``--page`` the table goes there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.render import fill
from s3cache.store import S3Options
from s3cache.testing import MotoServer
from tests.soak.run import MACHINES, PROCESSES, Account, soak
from tests.support.buckets import make_bucket, moto_place

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
        account = soak(root, port, _to_open(place), restart, options.seconds, options.seed)
    text = table(account, server_name, options.seed)
    print(text)
    if options.page:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(fill(page, "soak", text), encoding="utf-8")
    bad = list(complaints(account))
    for complaint in bad:
        print(f"BAD: {complaint}")
    return int(bool(bad))


def _server(stack: ExitStack) -> tuple[S3Options, Path | None, str]:
    endpoint = os.environ.get("S3CACHE_TEST_RGW_ENDPOINT")
    if endpoint is None:
        moto = stack.enter_context(MotoServer())
        return moto_place(moto), None, "a moto server (no Ceph RGW was to be had)"
    place = S3Options(
        f"s3cache-soak-{uuid.uuid4().hex[:12]}",
        endpoint_url=endpoint,
        region="us-east-1",
        access_key=os.environ["S3CACHE_TEST_RGW_ACCESS_KEY"],
        secret_key=os.environ["S3CACHE_TEST_RGW_SECRET_KEY"],
    )
    asyncio.run(make_bucket(place))
    return place, RESTART, "Ceph RGW"


def _to_open(place: S3Options) -> dict[str, Any]:
    return {
        "url": f"s3://{place.bucket}/soak",
        "region": place.region,
        "access_key": place.access_key,
        "secret_key": place.secret_key,
    }


# -- the account as a table


def complaints(account: Account) -> Iterator[str]:
    """What must not be."""
    if account.lost:
        yield f"lost {len(account.lost)} of {account.acknowledged}, as {account.lost[:5]}"
    if account.wrong:
        yield f"wrong: {account.wrong[:5]}"
    for each in account.growth:
        if not each.is_flat:
            yield f"{each.what} grew from {each.early:g} to {each.late:g}"
    yield from (f"a process failed: {error}" for error in account.errors[:3])


def table(account: Account, server: str, seed: int) -> str:
    counts, entries = account.counts, account.acknowledged
    minutes, misses = f"{account.seconds / 60:.0f} minutes", _account_of(account.misses)
    lines = [
        f"{PROCESSES} processes, {MACHINES} machines, {server}, {minutes}, seed {seed}.",
        "",
        "| | |",
        "|---|---|",
        f"| saves that were acknowledged | {counts['saved']:,}, of {entries:,} entries |",
        f"| saves that were not | {counts['refused']:,} |",
        f"| lookups | {counts['hit']:,} hits, {counts['miss']:,} misses ({misses}) |",
        f"| **lost** | {len(account.lost)} |",
        f"| **wrong** | {len(account.wrong)} |",
        *(
            f"| {kind}: slowest, and 99 of 100 | {account.slowest_ms[kind]:,.0f} ms, "
            f"{account.p99_ms[kind]:,.0f} ms |"
            for kind in sorted(account.slowest_ms)
        ),
        f"| what happened | {_account_of(account.happened)} |",
        *(
            f"| {_NAMES[each.what]}: early, late, most | {each.early:,.0f}, {each.late:,.0f}, "
            f"{each.most:,.0f} |"
            for each in account.growth
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


def _account_of(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "none"


if __name__ == "__main__":
    sys.exit(main())
