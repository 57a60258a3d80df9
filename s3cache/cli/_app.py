"""All commands, in the order in which ``--help`` lists them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from s3cache.cli._changes import clear, gc, mirror, prefetch, pull, push, rm
from s3cache.cli._entries import du, ls, verify
from s3cache.cli._explain import explain, report
from s3cache.cli._inspect import inspect
from s3cache.cli._jobs import bench, check, run, warm
from s3cache.cli._options import with_groups
from s3cache.cli._setup import doctor, keygen, stats, version
from s3cache.util import __version__

__all__ = ["app"]

_COMMANDS = (
    *(run, check, warm, version, doctor, stats, report, ls, du, inspect, explain, verify),
    *(rm, clear, gc, pull, push, prefetch, mirror, bench, keygen),
)
# What follows the name of a program is the program's.
_OF_A_PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer(
    name="s3cache",
    help="A shared compile cache for torch.compile in S3-compatible storage.",
    epilog="Where the cache is comes from --url or S3CACHE_URL; other settings from S3CACHE_*. "
    "Exit codes: 0 all is well, 1 something was found or is not done, 2 bad arguments or settings, "
    "3 the store or the disk cannot do it, 130 interrupted.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"s3cache {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version and exit; s3cache version says more.",
            is_eager=True,
            callback=_say_version,
        ),
    ] = False,
) -> None:
    pass  # its docstring would replace the help of the app


for _command in _COMMANDS:
    _context = _OF_A_PROGRAM if _command in (run, check) else None
    app.command(_command.__name__, context_settings=_context)(with_groups(_command))
