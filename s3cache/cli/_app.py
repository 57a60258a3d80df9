"""The commands, in the order of ``--help``, as one program of Typer."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import typer

from s3cache.cli import _entries, _machine
from s3cache.cli._options import Output, with_groups
from s3cache.seam import features, named
from s3cache.util import __version__

_COMMANDS: tuple[Callable[..., Any], ...] = (
    *(_machine.run, _machine.check, _machine.warm, _machine.doctor, _entries.stats),
    *(_machine.report, _machine.explain, _entries.ls, _entries.inspect, _entries.verify),
    *(_entries.rm, _entries.pull, _entries.push, _entries.mirror),
    *(_machine.recording(named(name)) for feature in features() for name in feature.commands),
    _machine.keygen,
)
_PACKAGES = (
    *("torch", "triton", "aioboto3", "aiobotocore", "botocore", "aiohttp", "msgpack"),
    *("zstandard", "tenacity", "pynacl", "typer"),
)
# Arguments after the name of a program belong to the program.
_OF_A_PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}

app = typer.Typer(
    name="s3cache",
    help="A shared compile cache for torch.compile in S3-compatible storage.",
    epilog="--url or S3CACHE_URL names the cache; S3CACHE_* variables set the rest. "
    "Exit codes: 0 success, 1 problems found or work left, 2 bad arguments or settings, "
    "3 the store or the disk failed, 130 interrupted.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_asked: bool) -> None:
    if not is_asked:
        return
    versions = {
        "s3cache": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "executable": sys.executable,
    }
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    Output(json=False).table((), versions.items())
    raise typer.Exit


@app.callback()
def _root(
    _: bool = typer.Option(
        False,
        "--version",
        help="Show versions, for bug reports.",
        is_eager=True,
        callback=_version,
    ),
) -> None:
    pass  # its docstring would replace the help of the app


for _command in _COMMANDS:
    _context = _OF_A_PROGRAM if _command in (_machine.run, _machine.check) else None
    app.command(_command.__name__, context_settings=_context)(with_groups(_command))

program = typer.main.get_command(app)
