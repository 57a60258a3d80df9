"""``python -m s3cache run train.py ...``: run a program with the cache turned on, unchanged.

Also ``run -m module ...``, and under torchrun: ``torchrun ... -m s3cache run train.py ...``.
"""

from __future__ import annotations

import argparse
import os
import sys

from s3cache._programs import run_program
from s3cache.errors import ConfigError


def main(arguments: list[str]) -> None:
    """Do what the arguments say; bad ones end the program with status 2 and one clear error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error(f"there is no {'module' if options.module else 'script'} to run")
    if not options.module and not os.path.exists(options.program[0]):
        parser.error(f"script {options.program[0]}: no such file")
    try:
        _enable()
    except ConfigError as exc:
        parser.error(str(exc))
    run_program(options.program, module=options.module)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m s3cache",
        description="A shared compile cache for torch.compile.",
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a Python program with s3cache turned on",
        epilog="The environment says where the cache is: S3CACHE_URL=s3://bucket/prefix, and other "
        "S3CACHE_* settings.",
        allow_abbrev=False,
    )
    run.add_argument("-m", dest="module", action="store_true", help="a module, not a script")
    run.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="the script or module, and arguments for it, which are passed on as they are",
    )
    return parser


def _enable() -> None:
    from s3cache.hooks import enable

    enable()


if __name__ == "__main__":
    main(sys.argv[1:])
