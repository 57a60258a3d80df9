"""``s3cache doctor``: is everything as it must be?"""

from __future__ import annotations

from typing import Annotated

import typer

from s3cache._pages import pointer
from s3cache._words import counted
from s3cache.cli._choosing import Url
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output, redacted

__all__ = ["doctor"]


@grouped(out=Output)
def doctor(
    out: Output,
    url: Url = None,
    write: Annotated[
        bool, typer.Option("--write/--no-write", help="Write an object of its own, and remove it.")
    ] = True,
    programs: Annotated[
        bool, typer.Option("--programs/--no-programs", help="Start torch and the compiler, too.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Seconds for any one request.", min=0.1)] = 15.0,
) -> None:
    """Check settings, credentials, rights, latency, clock, disk, torch, compiler and trust.

    Each check has a verdict, and where it is not well a fix and the command that says more of it.
    Exit code 1 if any is a fault. Nothing is waited for without bound.
    """
    from s3cache.doctor import examine

    faults = warnings = 0
    for check in examine(url, may_write=write, programs=programs, timeout_s=timeout):
        faults += check.verdict == "fault"
        warnings += check.verdict == "warning"
        found, fix = redacted(check.found), redacted(check.fix)
        if out.json:
            name, verdict = check.name, check.verdict
            record = {"name": name, "verdict": verdict, "found": found, "fix": fix}
            out.record({**record, "code": check.code, "section": check.section})
            continue
        out.line(f"{check.verdict:8} {check.name}: {found}")
        if fix:
            out.line(f"{'':8} fix: {fix}{f' {pointer(*check.codes)}' if check.codes else ''}")
    out.note(f"{counted(faults, 'fault')}, {counted(warnings, 'warning')}")
    raise typer.Exit(1 if faults else 0)
