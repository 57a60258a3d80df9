"""Three machines train a small GPT on a book; one of them compiles it for all.

    make demo                                    an S3 server of the demo's own
    S3CACHE_URL=s3://bucket/prefix make demo     yours, with credentials as for any AWS tool

Each machine is a process with an empty home, cache and temporary directory of its own. The first
compiles and uploads. The second has an empty disk and starts from the bucket; when it starts again,
it finds all entries on its own disk. The third has its virtual environment and its caches in other
places. Recall is on: no later job traces a frame that the first job has traced. The exit status is
0 only if all later jobs hit and recall, and all losses equal the first machine's, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples._show import bars
from examples._stage import Machine, bucket, present


@dataclass
class Report:
    """The reports of one job."""

    first_step_s: float = 0.0
    since_start_s: float = 0.0
    losses: list[str] = field(default_factory=list)  # as hexadecimal floats
    hits: dict[str, int] = field(default_factory=dict)
    misses: int = 0
    time_saved_s: float = 0.0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    recalled: int = 0
    traced: int = 0

    def take(self, line: Mapping[str, Any]) -> None:
        if line["what"] == "first":
            self.first_step_s, self.since_start_s = line["step_s"], line["since_start_s"]
        elif line["what"] == "step":
            self.losses.append(line["loss"])
        elif line["what"] == "cache":
            self.hits, self.misses = line["hits"], line["misses"]
            self.time_saved_s = line["time_saved_s"]
            self.uploaded_bytes = line["uploaded_bytes"]
            self.downloaded_bytes = line["downloaded_bytes"]
            self.recalled, self.traced = line["recalled"], line["traced"]

    def equal_losses(self, other: Report) -> int:
        """Return the number of steps with exactly the other's loss."""
        return sum(a == b for a, b in zip(self.losses, other.losses, strict=False))


def tour(console: Console, root: Path, stack: ExitStack, layers: int, steps: int) -> bool:
    """Run all machines and print a comparison; return whether it is as promised."""
    environment, url = stack.enter_context(bucket(console))
    environment = {**environment, "S3CACHE_URL": url, "S3CACHE_RECALL": "on"}

    def train(machine: Machine) -> Report:
        return run(console, machine, layers, steps)

    console.print(f"[bold]Machine 1[/] compiles a GPT of {layers} layers, and shares it.")
    first = train(Machine(console, root, "1", environment))

    console.print("[bold]Machine 2[/] has an empty disk.")
    second_machine = Machine(console, root, "2", environment)
    second = train(second_machine)
    console.print("[bold]Machine 2[/] is started again.")
    again = train(second_machine)

    console.print("[bold]Machine 3[/] has everything in other places.")
    elsewhere = root / "somewhere" / "else"
    third = train(
        Machine(
            console,
            root,
            "3",
            {
                **environment,
                "S3CACHE_LOCAL_DIR": str(elsewhere / "compiled"),
                "TORCHINDUCTOR_CACHE_DIR": str(elsewhere / "inductor"),
            },
            python=other_environment(elsewhere / "venv"),
        )
    )

    reports = {"1: compiles": first, "2: empty disk": second, "2, again": again, "3: moved": third}
    console.print()
    console.print(summary(reports))
    text, good = verdict(first, {"bucket": [second, third], "disk": [again]}, steps)
    console.print()
    console.print(f"[bold {'green' if good else 'red'}]{text}[/]", highlight=False, soft_wrap=True)
    return good


def run(console: Console, machine: Machine, layers: int, steps: int) -> Report:
    """Run one job on ``machine``, with a bar for its steps."""
    report = Report()
    arguments = ["--layers", layers, "--steps", steps, "--began-s", time.monotonic()]
    with (
        machine.job("examples._gpt_job", *map(str, arguments)) as job,
        bars(console, {"steps": steps}) as shown,
    ):
        for line in job.lines():
            report.take(line)
            shown.show({"steps": len(report.losses)})
    return report


def other_environment(prefix: Path) -> Path:
    """Make a virtual environment at ``prefix`` with this one's packages; return its interpreter.

    The packages are not copied: links at other paths lead to them.
    """
    venv.create(prefix, symlinks=True)
    paths = {"base": str(prefix), "platbase": str(prefix)}
    there = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    # The two may differ (lib and lib64), and either may hold torch.
    here = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    for package in (package for path in here for package in Path(path).iterdir()):
        link = there / package.name
        if not link.exists():
            link.symlink_to(package)
    return prefix / "bin" / "python"


def summary(reports: Mapping[str, Report]) -> Table:
    """Return a table that compares the jobs."""
    first = next(iter(reports.values()))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("machine")
    for name in reports:
        table.add_column(name, justify="right")

    def row(label: str, cell: Callable[[Report], str]) -> None:
        table.add_row(label, *(cell(report) for report in reports.values()))

    row("first step, s", lambda it: f"{it.first_step_s:.2f}")
    row("process start to its end, s", lambda it: f"{it.since_start_s:.2f}")
    row("time of compiling saved, s", lambda it: _some(it.time_saved_s, ".1f"))
    row("frames recalled / traced", lambda it: f"{it.recalled} / {it.traced}")
    row("graphs compiled", lambda it: _some(it.misses, "d"))
    row("graphs hit", lambda it: _some(sum(it.hits.values()), "d"))
    row("MB uploaded", lambda it: _some(it.uploaded_bytes / 1e6, ".2f"))
    row("MB downloaded", lambda it: _some(it.downloaded_bytes / 1e6, ".2f"))
    row("loss, first step", lambda it: f"{float.fromhex(it.losses[0]):.4f}")
    row("loss, last step", lambda it: f"{float.fromhex(it.losses[-1]):.4f}")
    row("losses equal, bit for bit", lambda it: f"{it.equal_losses(first)}/{len(it.losses)}")
    return table


def _some(number: float, form: str) -> str:
    return format(number, form) if number else "-"


def verdict(first: Report, others: Mapping[str, Sequence[Report]], steps: int) -> tuple[str, bool]:
    """Return the closing line, and whether all ``others`` started warm from the bucket or disk.

    An entry of the bucket hits in the local tier if it was fetched before its lookup.
    """
    jobs = [(place, job) for place, found in others.items() for job in found]
    if not first.misses or not jobs:
        return "NOTHING WAS COMPILED, so nothing could be shared.", False
    if any(
        job.misses
        or sum(job.hits.values()) != first.misses
        or (not job.downloaded_bytes if place == "bucket" else job.hits.get("remote"))
        for place, job in jobs
    ):
        return "COMPILED AGAIN: not every graph was found where it had to be.", False
    if any(job.traced or job.recalled != first.traced for _, job in jobs):
        return "TRACED AGAIN: not every frame was recalled.", False
    if any(job.equal_losses(first) != steps for _, job in jobs):
        return "WRONG: a machine that started warm has other losses than the first.", False
    slowest = max(job.first_step_s for _, job in jobs)
    return (
        f"Compiled once: the first step took {first.first_step_s:.1f} s on machine 1 and "
        f"{slowest:.1f} s or less afterwards; all {steps} losses are equal, bit for bit."
    ), True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (4)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each machine (100)")
    options = parser.parse_args(arguments)
    if min(options.layers, options.steps) < 1:
        parser.error("--layers and --steps must be at least 1")
    return present(
        lambda console, root, stack: tour(console, root, stack, options.layers, options.steps)
    )


if __name__ == "__main__":
    sys.exit(main())
