"""``python -m s3cache run train.py ...``: run a program with the cache turned on, unchanged.

Also ``run -m module ...``, and under torchrun: ``torchrun ... -m s3cache run train.py ...``.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

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
    sys.argv = options.program
    if options.module:
        _become_main()
        # What the interpreter does for -m.
        runpy._run_module_as_main(options.program[0])  # type: ignore[attr-defined]
    elif os.path.isdir(options.program[0]) or options.program[0].endswith((".zip", ".pyz")):
        runpy.run_path(options.program[0], run_name="__main__")
    else:
        _run_script(options.program[0])


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


def _become_main() -> ModuleType:
    """A fresh ``__main__``, which stays: what is pickled or runs at exit finds it there."""
    main_module = ModuleType("__main__")
    sys.modules["__main__"] = main_module
    return main_module


def _run_script(path: str) -> None:
    """As the interpreter runs a script it is given."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main_module = _become_main()
    main_module.__file__ = os.path.join(os.getcwd(), path)  # as it is, dots and all
    main_module.__loader__ = SourceFileLoader("__main__", path)
    main_module.__dict__.update(__builtins__=__builtins__, __cached__=None, __annotations__={})
    with open(path, "rb") as file:
        code = compile(file.read(), main_module.__file__, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)  # noqa: S102 - it is what we were asked to run


if __name__ == "__main__":
    main(sys.argv[1:])
