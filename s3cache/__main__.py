"""``python -m s3cache run train.py ...``: run a program with the cache turned on, unchanged.

Also ``run -m module ...``, and under torchrun: ``torchrun ... -m s3cache run train.py ...``.
"""

from __future__ import annotations

import os
import runpy
import sys

from s3cache.errors import ConfigError

_USAGE = """\
usage: python -m s3cache run [-m MODULE | SCRIPT] [ARGUMENTS ...]

Runs a Python program with s3cache turned on. The environment says where the cache is:
S3CACHE_URL=s3://bucket/prefix, and other S3CACHE_* settings.
"""


def main(arguments: list[str]) -> int:
    """Run what the arguments name; returns an exit status for bad usage."""
    if arguments[:1] != ["run"] or len(arguments) < 2 or arguments[1:] == ["-m"]:
        sys.stderr.write(_USAGE)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    from s3cache.hooks import enable

    try:
        enable()
    except ConfigError as exc:
        sys.stderr.write(f"s3cache: {exc}\n")
        return 2
    if arguments[1] == "-m":
        sys.argv = arguments[2:]
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments[1:]
        # As the interpreter does for a script it is given.
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[1]))
        runpy.run_path(arguments[1], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
