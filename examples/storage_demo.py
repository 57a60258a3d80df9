"""Two machines share a bucket; one of them is killed half-way. Nothing acknowledged is lost.

    .venv/bin/python -m examples.storage_demo            an S3 server of the demo's own
    S3CACHE_URL=s3://bucket/prefix .venv/bin/python ...  yours, with credentials as for any AWS tool

Each machine is a process with an empty home, cache and temporary directory of its own. Machine A
saves the graphs that it "compiles" over a slow uplink, until SIGKILL ends it during its uploads. It
is started again and continues. Then machine B, with an empty disk, looks all graphs up and compares
every byte with the bytes that A must have saved. The exit status is 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples._show import bars
from examples._stage import DemoError, Machine, bucket, present


@dataclass
class Report:
    """The reports of one process, until it ended."""

    acknowledged: set[str] = field(default_factory=set)
    intact: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: {"local": [], "remote": []})
    uploading: set[str] = field(default_factory=set)
    uploaded: set[str] = field(default_factory=set)
    uploaded_bytes: int = 0
    downloaded: set[str] = field(default_factory=set)
    downloaded_bytes: int = 0
    remaining: int | None = None  # uploads left at the end; None if it was killed before

    def take(self, line: Mapping[str, Any]) -> None:
        what, key = line["what"], line.get("key", "")
        if what == "saved" and line["durable"]:
            self.acknowledged.add(key)
        elif what == "refused":
            self.refused[line["reason"]] += 1
        elif what == "hit":
            (self.intact if line["intact"] else self.damaged).add(key)
            self.hits[line["tier"]] += 1
            self.latencies_s[line["tier"]].append(line["elapsed_s"])
        elif what == "miss":
            self.misses[line["reason"]] += 1
        elif what == "upload":
            (self.uploading.add if line["step"] == "started" else self.uploading.discard)(key)
            if line["step"] == "done":
                self.uploaded.add(key)
                self.uploaded_bytes += line["size"]
        elif what == "download" and line["step"] == "done":
            self.downloaded.add(key)
            self.downloaded_bytes += line["size"]
        elif what == "closed":
            self.remaining = line["remaining"]

    @property
    def used(self) -> int:
        """Return the number of graphs that were found, or compiled and acknowledged."""
        return len(self.intact | self.damaged | self.acknowledged)


def run(
    console: Console,
    machine: Machine,
    arguments: Sequence[str],
    *,
    totals: Mapping[str, int],
    progress: Callable[[Report], Mapping[str, int]],
    kill_when: Callable[[Report], bool] = lambda report: False,
) -> Report:
    """Run the job with bars for ``totals``; kill it as soon as ``kill_when`` is true."""
    report = Report()
    with machine.job("examples._machine", *arguments) as job, bars(console, totals) as shown:
        for line in job.lines():
            report.take(line)
            shown.show(progress(report))
            if not job.killed and kill_when(report):
                job.kill()
    return report


def tour(console: Console, root: Path, stack: ExitStack, count: int) -> bool:
    """Run both machines and print a summary; return whether no entry was lost."""
    environment, url = stack.enter_context(bucket(console))
    job = ["--url", url, "--graphs", str(count)]

    machine_a = Machine(console, root, "a", environment)
    console.print(f"[bold]Machine A[/] needs {count} graphs; its uplink is slow.", highlight=False)
    killed = run(
        console,
        machine_a,
        [*job, "--slow-uplink"],
        totals={"acknowledged": count, "uploaded": count},
        progress=lambda now: {
            "acknowledged": len(now.acknowledged),
            "uploaded": len(now.uploaded),
        },
        kill_when=lambda now: (
            len(now.acknowledged) >= count // 2 and bool(now.uploaded) and bool(now.uploading)
        ),
    )
    if killed.remaining is not None:
        raise DemoError("machine A was done before it could be killed half-way")
    waiting = killed.acknowledged - killed.uploaded
    console.print(
        f"  [red]SIGKILL[/] with {len(waiting)} acknowledged entries not uploaded yet, "
        f"{len(killed.uploading)} of them under way.\n",
        highlight=False,
        soft_wrap=True,
    )

    console.print("[bold]Machine A[/] is started again, on a normal uplink.", highlight=False)
    resumed = run(
        console,
        machine_a,
        job,
        totals={"in hand": count, "uploaded": count},
        progress=lambda now: {
            "in hand": now.used,
            "uploaded": len(now.uploaded | killed.uploaded),
        },
    )
    console.print(
        f"  {len(waiting & resumed.uploaded)} uploads of the killed process were finished.\n",
        highlight=False,
    )

    machine_b = Machine(console, root, "b", environment)
    prefetched = count * 2 // 3
    console.print(
        f"[bold]Machine B[/] has an empty disk: it prefetches {prefetched}, and looks up all.",
        highlight=False,
    )
    fresh = run(
        console,
        machine_b,
        [*job, "--prefetch", str(prefetched)],
        totals={"downloaded": count, "verified": count},
        progress=lambda now: {"downloaded": len(now.downloaded), "verified": len(now.intact)},
    )
    console.print()
    console.print(summary({"A, killed": killed, "A, resumed": resumed, "B, fresh": fresh}))
    text, good = verdict(killed, resumed, fresh)
    console.print()
    console.print(f"[bold {'green' if good else 'red'}]{text}[/]", highlight=False, soft_wrap=True)
    return good


def summary(reports: Mapping[str, Report]) -> Table:
    """Return a table that compares the processes."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")

    def row(label: str, cell: Callable[[Report], str]) -> None:
        table.add_row(label, *(cell(report) for report in reports.values()))

    row("entries saved and acknowledged", lambda it: _count(len(it.acknowledged)))
    row("uploads finished", lambda it: _count(len(it.uploaded)))
    row("hits, local tier", lambda it: _count(it.hits["local"]))
    row("hits, remote tier", lambda it: _count(it.hits["remote"]))
    for reason in sorted({reason for it in reports.values() for reason in it.misses}):
        row(f"misses, {reason}", lambda it, reason=reason: _count(it.misses[reason]))
    row("MB uploaded", lambda it: _megabytes(it.uploaded_bytes))
    row("MB downloaded", lambda it: _megabytes(it.downloaded_bytes))
    for tier in ("local", "remote"):
        for percent in (50, 99):
            row(
                f"ms for a hit, {tier}, p{percent}",
                lambda it, tier=tier, percent=percent: _milliseconds(it.latencies_s[tier], percent),
            )
    return table


def _count(number: int) -> str:
    return str(number) if number else "-"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}" if size else "-"


def _milliseconds(latencies_s: Sequence[float], percent: int) -> str:
    if not latencies_s:
        return "-"
    rank = math.ceil(percent / 100 * len(latencies_s))
    return f"{1e3 * sorted(latencies_s)[rank - 1]:.1f}"


def verdict(killed: Report, resumed: Report, fresh: Report) -> tuple[str, bool]:
    """Return the closing line, and whether every acknowledged entry was there as saved."""
    acknowledged = killed.acknowledged | resumed.acknowledged
    # Machine A compiles a graph again if it does not find the entry: that is a loss, too.
    lost = (killed.acknowledged - resumed.intact) | (acknowledged - fresh.intact)
    wrong = killed.damaged | resumed.damaged | fresh.damaged
    if wrong:
        return f"WRONG BYTES in {len(wrong)} entries.", False
    if lost or not acknowledged:
        return f"LOST: {len(lost)} of {len(acknowledged)} acknowledged entries.", False
    waiting = len(killed.acknowledged - killed.uploaded)
    return (
        f"Nothing acknowledged was lost: machine B has all {len(acknowledged)} entries, byte for "
        f"byte, {waiting} of which were not uploaded when machine A was killed."
    ), True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--entries", type=int, default=60, help="graphs to save (60, about 60 MB)")
    options = parser.parse_args(arguments)
    if options.entries < 4:
        parser.error("--entries: a kill half-way needs at least 4")
    return present(lambda console, root, stack: tour(console, root, stack, options.entries))


if __name__ == "__main__":
    sys.exit(main())
