"""``s3cache explain``: why lookups missed, and what was not cached at all."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from s3cache.cli._choosing import Url
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output

__all__ = ["explain"]

# ruff: noqa: UP045 - Typer reads annotations while the program runs, in Python 3.10 too


@grouped(out=Output)
def explain(
    out: Output,
    key: Annotated[
        Optional[str],
        typer.Argument(
            metavar="[KEY]", help="What was looked up, or the beginning of it.", show_default=False
        ),
    ] = None,
    run: Annotated[
        Optional[str],
        typer.Option(metavar="ID", help="A run, as this prints it. Default: the last one."),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Ask the remote for nothing.")] = False,
    url: Url = None,
) -> int:
    """Say why lookups missed: the nearest entry, and what its key differs in.

    Of the last process on this machine that looked something up, unless told otherwise. What was
    looked up is recorded in the local tier (S3CACHE_RECORD=0: it is not). It is compared with what
    was looked up before, and with what hints in the remote lead to, which nobody has signed. Exits
    with 1 if anything missed or was bypassed.
    """
    from s3cache.explaining import explain as explained

    found = explained(run, key=key, url=url, remote=not local)
    if out.json:
        out.record(found.as_dict())
    else:
        out.line(str(found))
    return 1 if found.explanations else 0
