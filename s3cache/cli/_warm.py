"""``s3cache warm``: run a job until it has compiled and shared what it compiles, then end it."""

from __future__ import annotations

from typing import Annotated

import typer

from s3cache._words import counted
from s3cache.cli._choosing import Steps, Url, duration_s
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output

__all__ = ["warm"]

_ENDS = {
    "itself": "the job ended by itself",
    "steps": "the job was ended: its steps are done",
    "quiet": "the job was ended: it compiled nothing more",
    "timeout": "the job was ended: its time was over",
}
_NOTHING = (
    "the job called nothing that torch.compile compiles by Inductor, or turned the cache off: "
    "s3cache check says what a program compiles"
)


@grouped(out=Output)
def warm(
    out: Output,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The job, as a shell has it.")
    ],
    steps: Steps = None,
    quiet: Annotated[
        str, typer.Option(metavar="TIME", help="End it when it compiled nothing for so long.")
    ] = "60s",
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="End it after that time in any case.")
    ] = "2h",
    url: Url = None,
) -> int:
    """Run a job until it compiles nothing more and all is uploaded, then end it.

    For a build step, or one machine before a fleet starts: what it compiled is in the remote then.
    The cache is turned on in all its processes, which are ended with SIGTERM. Steps of an optimizer
    that is itself compiled cannot be counted, and inference has none: there --quiet ends the job.
    Exits with 1 if the time was over, the job failed, something is not uploaded, or it compiled
    nothing at all.
    """
    from s3cache.warming import warm as warmed

    done = warmed(
        command,
        quiet_s=duration_s("--quiet", quiet),
        timeout_s=duration_s("--timeout", timeout),
        steps=steps,
        url=url,
    )
    if out.json:
        out.record({**vars(done), "is_warm": done.is_warm})
        return 0 if done.is_warm else 1
    code = f" with {done.exit_code}" if done.exit_code else ""
    out.note(f"{_ENDS[done.end]}{code}")
    left = f", {done.to_upload} not uploaded" if done.to_upload else ", all is uploaded"
    if not done.compiled:
        out.note(f"nothing was compiled, so nothing is warm{left if done.to_upload else ''}")
        out.note(_NOTHING)
        return 1
    out.note(
        f"{counted(done.hits, 'graph')} hit, {done.misses} missed, of which {done.added} are in "
        f"the cache now; {done.bypasses} bypassed{left}"
    )
    return 0 if done.is_warm else 1
