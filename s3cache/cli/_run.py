"""``s3cache run train.py ...``: run a program with the cache turned on, unchanged.

Also ``run -m module ...``, ``run -c code ...`` and ``run - ...``. The processes that the program
starts have the cache too: ``run -m torch.distributed.run ... train.py`` and ``torchrun ... -m
s3cache run train.py`` come to the same.
"""

from __future__ import annotations

import argparse
import os
import secrets

from s3cache._pages import pointer
from s3cache._programs import run_command, run_input, run_module, run_path
from s3cache.errors import ConfigError

__all__ = ["parser_of_run", "run"]


def run(arguments: list[str]) -> None:
    """Run the program; bad arguments end the process with status 2 and one clear error."""
    parser = parser_of_run()
    options = parser.parse_args(arguments)
    if not options.program:
        kind = "module" if options.module else "code" if options.command else "script"
        parser.error(f"there is no {kind} to run")
    program = options.program
    start = run_module if options.module else run_command if options.command else run_path
    if start is run_path and program[0] == "-":
        start = run_input
    elif start is run_path and not os.path.exists(program[0]):
        parser.error(f"script {program[0]}: no such file")
    try:
        _enable(options.url, "json" if options.json else None)
    except ConfigError as exc:
        parser.error(f"{exc} {pointer('ConfigError')}")
    start(program)


def parser_of_run() -> argparse.ArgumentParser:
    """What reads ``run ...``: everything after the program's name is the program's."""
    parser = argparse.ArgumentParser(
        prog="s3cache", description="A shared compile cache for torch.compile."
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a Python program with s3cache turned on",
        epilog="Without --url the environment says where the cache is: S3CACHE_URL. Other settings "
        "come from there too: S3CACHE_*. Each process that compiles ends with one line of what hit "
        "and missed (S3CACHE_SUMMARY=0: none).",
        allow_abbrev=False,
    )
    run.add_argument("--url", help="where the cache is, such as s3://bucket/prefix")
    run.add_argument(
        "--json",
        action="store_true",
        help="make that line an object of JSON (S3CACHE_SUMMARY=json)",
    )
    kinds = run.add_mutually_exclusive_group()
    kinds.add_argument("-m", dest="module", action="store_true", help="a module, not a script")
    kinds.add_argument("-c", dest="command", action="store_true", help="code, not a script")
    run.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="what python runs too: a script, a .pyc, a directory or zip file with a __main__, '-' "
        "for standard input; and arguments for it, which are passed on as they are",
    )
    return parser


def _enable(url: str | None, summary: str | None) -> None:
    """Here, and by the environment in every process that this one starts."""
    from s3cache.hooks import enable
    from s3cache.records import JOB, job_here

    if url is not None:
        os.environ["S3CACHE_URL"] = url
    os.environ.setdefault("S3CACHE_AUTOLOAD", "1")  # without a URL too
    if summary is not None:
        os.environ["S3CACHE_SUMMARY"] = summary
    os.environ.setdefault("S3CACHE_SUMMARY", "1")
    if not job_here():  # then each rank is one of a job already
        os.environ[JOB] = secrets.token_hex(4)
    enable()
