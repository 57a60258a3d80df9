"""Two machines share a bucket; one of them is killed half-way. Nothing acknowledged is lost.

    make demo                                    an S3 server of the demo's own
    S3CACHE_URL=s3://bucket/prefix make demo     yours, with credentials as for any AWS tool

Each machine is a process with an empty home, cache and temporary directory of its own. Machine A
saves what it "compiles" over a slow uplink until it is killed with SIGKILL, while uploads are under
way. It is started again and goes on. Then machine B, with nothing on its disk, asks for everything
and compares every byte with what A must have saved. Exit status 1 if anything is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples._show import bars
from examples._workload import Graph, graphs
from s3cache import entries
from s3cache.errors import S3CacheError
from s3cache.store import open_store
from s3cache.store._s3_options import S3Options

_ROOT = Path(__file__).resolve().parent.parent
_JOB_TIMEOUT_S = 120.0


class DemoError(Exception):
    """The demo itself could not go on."""


@dataclass
class Report:
    """What one process has told, as far as it got."""

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
    remaining: int | None = None  # uploads left at the end; None if it did not come to that

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
        """Graphs the job has in hand: found, or compiled and acknowledged."""
        return len(self.intact | self.damaged | self.acknowledged)


class Machine:
    """A computer with empty disks, as far as a process can tell."""

    def __init__(self, console: Console, root: Path, name: str, environment: dict[str, str]):
        self._console = console
        self._stderr = root / f"{name}.log"
        self._environment = dict(environment)
        for variable in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
            path = root / name / variable.lower()
            path.mkdir(parents=True, mode=0o700)
            self._environment[variable] = str(path)

    def run(
        self,
        arguments: Sequence[str],
        *,
        totals: Mapping[str, int],
        progress: Callable[[Report], Mapping[str, int]],
        kill_when: Callable[[Report], bool] = lambda report: False,
    ) -> Report:
        """Run the job with bars for ``totals``; SIGKILL it as soon as ``kill_when`` says so."""
        report = Report()
        killed = False
        with (
            self._stderr.open("ab") as stderr,
            _process("examples._machine", *arguments, env=self._environment, stderr=stderr) as job,
            bars(self._console, totals) as shown,
        ):
            assert job.stdout is not None
            overdue = threading.Timer(_JOB_TIMEOUT_S, job.kill)
            overdue.daemon = True
            overdue.start()
            for line in job.stdout:  # to the end, after a kill too: it was told before
                report.take(json.loads(line))
                shown.show(progress(report))
                if not killed and kill_when(report):
                    job.kill()
                    killed = True
            status = job.wait()
            overdue.cancel()
        self._warnings()
        if status != 0 and not (killed and status == -signal.SIGKILL):
            raise DemoError(f"a machine ended with status {status}")
        return report

    def _warnings(self) -> None:
        text = self._stderr.read_text(errors="replace")
        if text:
            self._console.print(
                text, style="yellow", markup=False, highlight=False, soft_wrap=True, end=""
            )
        self._stderr.write_text("")


@contextmanager
def _process(
    module: str, *arguments: str, env: Mapping[str, str], stderr: Any
) -> Iterator[subprocess.Popen[str]]:
    """A Python process that ends with the block, out of reach of the terminal's Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=_ROOT,
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def embedded_server(root: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """The URL of a bucket on a server of our own."""
    log = root / "server.log"
    with (
        log.open("wb") as stderr,
        _process(
            "examples._server", env={**environment, "TMPDIR": str(root)}, stderr=stderr
        ) as server,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if not url:
            raise DemoError(f"the S3 server did not start:\n{log.read_text()}")
        yield url


def basic_environment() -> dict[str, str]:
    """What any process needs, and nothing that leads to the user's own caches and buckets."""
    wanted = ("PATH", "LANG", "LD_LIBRARY_PATH")
    return {
        name: value
        for name, value in os.environ.items()
        if name in wanted or name.startswith("LC_")
    }


def users_s3_environment() -> dict[str, str]:
    """How the user's machine reaches S3."""
    s3_options = {f"S3CACHE_{each.name.upper()}" for each in fields(S3Options)}
    found = {
        name: value
        for name, value in os.environ.items()
        if name in s3_options or name.startswith("AWS_") or name.lower().endswith("_proxy")
    }
    # The machines' homes are empty, and a profile lives in the user's.
    home = Path.home() / ".aws"
    found.setdefault("AWS_CONFIG_FILE", str(home / "config"))
    found.setdefault("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
    return found


async def check_bucket(url: str, name: str) -> None:
    """Raises :class:`S3CacheError` unless the bucket is there and answers."""
    store = open_store(url)
    try:
        async for _ in store.list(name):
            pass
    finally:
        await store.aclose()


async def remove_from_bucket(url: str, wanted: Sequence[Graph]) -> None:
    """Take out of the bucket what the demo put there."""
    store = open_store(url)
    try:
        for graph in wanted:
            await store.delete(entries.first_name(graph.key))
            await store.delete(entries.variant_name(graph.key, ""))
    finally:
        await store.aclose()


@contextmanager
def users_bucket(url: str, wanted: Sequence[Graph]) -> Iterator[str]:
    """``url``, if it can be used; afterwards none of ``wanted`` is left there."""
    if url.startswith("memory:"):
        raise DemoError("a memory:// store is of one process: unset S3CACHE_URL or use s3://")
    try:
        asyncio.run(check_bucket(url, entries.first_name(wanted[0].key)))
        try:
            yield url
        finally:
            asyncio.run(remove_from_bucket(url, wanted))
    except S3CacheError as error:
        raise DemoError(f"S3CACHE_URL cannot be used: {error}") from error


def tour(console: Console, root: Path, stack: ExitStack, count: int) -> bool:
    """Run both machines and print what became of the entries; whether nothing was lost."""
    environment = basic_environment()
    run = uuid.uuid4().hex
    url = os.environ.get("S3CACHE_URL", "")
    if url:
        environment.update(users_s3_environment())
        stack.enter_context(users_bucket(url, graphs(count, run)))
        where = url.partition("?")[0]
    else:
        environment.update(AWS_ACCESS_KEY_ID="demo", AWS_SECRET_ACCESS_KEY="demo")
        url = stack.enter_context(embedded_server(root, environment))
        where = "moto, an S3 server in memory, on this machine's loopback"
    console.print(f"Bucket: {where}\n", highlight=False, soft_wrap=True)
    job = ["--url", url, "--run", run, "--graphs", str(count)]

    machine_a = Machine(console, root, "a", environment)
    console.print(f"[bold]Machine A[/] needs {count} graphs; its uplink is slow.", highlight=False)
    killed = machine_a.run(
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

    console.print("[bold]Machine A[/] is started again, on an uplink as it is.", highlight=False)
    resumed = machine_a.run(
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
        f"[bold]Machine B[/] has an empty disk: it prefetches {prefetched} and looks all up.",
        highlight=False,
    )
    fresh = machine_b.run(
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
    """What each process did, side by side."""
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
    """The closing line, and whether every acknowledged entry was there, as saved, afterwards."""
    acknowledged = killed.acknowledged | resumed.acknowledged
    # Machine A compiles anew what it does not find: that too would have been a loss.
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


def _stop(number: int, frame: object) -> None:
    # As Ctrl-C does: through every `with` and `finally` on the way out.
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--entries", type=int, default=60, help="graphs to save (60, about 60 MB)")
    options = parser.parse_args(arguments)
    if options.entries < 4:
        parser.error("--entries: a kill half-way takes 4 at least")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    console = Console()
    began_s = time.monotonic()
    try:
        with ExitStack() as stack:
            root = stack.enter_context(tempfile.TemporaryDirectory(prefix="s3cache-demo-"))
            good = tour(console, Path(root), stack, options.entries)
    except KeyboardInterrupt:
        console.print("interrupted; everything is cleaned up")
        return 130
    except DemoError as error:
        console.print(f"The demo failed: {error}", markup=False, soft_wrap=True)
        return 1
    console.print(
        f"{time.monotonic() - began_s:.0f} s, everything is cleaned up.",
        style="dim",
        highlight=False,
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
