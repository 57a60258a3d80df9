"""All commands, in the order in which ``--help`` lists them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from s3cache._version import __version__
from s3cache.cli._changes import clear, gc, mirror, prefetch, pull, push, rm
from s3cache.cli._entries import du, ls, verify
from s3cache.cli._explain import explain, report
from s3cache.cli._inspect import inspect
from s3cache.cli._jobs import bench, check, run, warm
from s3cache.cli._setup import doctor, keygen, show_version, stats

__all__ = ["app"]

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
    # The help of the app is said above.
    pass


# What follows the name of a program is the program's.
_OF_A_PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}

app.command("run", context_settings=_OF_A_PROGRAM)(run)
app.command("check", context_settings=_OF_A_PROGRAM)(check)
app.command("warm")(warm)
app.command("version")(show_version)
app.command("doctor")(doctor)
app.command("stats")(stats)
app.command("report")(report)
app.command("ls")(ls)
app.command("du")(du)
app.command("inspect")(inspect)
app.command("explain")(explain)
app.command("verify")(verify)
app.command("rm")(rm)
app.command("clear")(clear)
app.command("gc")(gc)
app.command("pull")(pull)
app.command("push")(push)
app.command("prefetch")(prefetch)
app.command("mirror")(mirror)
app.command("bench")(bench)
app.command("keygen")(keygen)
