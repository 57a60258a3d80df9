"""``python -m s3cache run train.py ...``: run a program with the cache turned on, unchanged.

Also ``run -m module ...``, and under torchrun: ``torchrun ... -m s3cache run train.py ...``.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from s3cache.errors import ConfigError

_USAGE = """\
usage: python -m s3cache run [-m MODULE | SCRIPT] [ARGUMENTS ...]

Runs a Python program with s3cache turned on. The environment says where the cache is:
S3CACHE_URL=s3://bucket/prefix, and other S3CACHE_* settings.
"""


class _UsageError(Exception):
    """What was asked for on the command line makes no sense."""


def main(arguments: list[str]) -> int:
    """Run what the arguments name; returns an exit status for bad usage."""
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    try:
        module, program = _what(arguments)
        _enable()
    except (_UsageError, ConfigError) as exc:
        sys.stderr.write(f"s3cache: {exc}\n")
        return 2
    sys.argv = program
    if module:
        _become_main()
        # What the interpreter does for -m.
        runpy._run_module_as_main(program[0])  # type: ignore[attr-defined]
    elif os.path.isdir(program[0]) or program[0].endswith((".zip", ".pyz")):
        runpy.run_path(program[0], run_name="__main__")
    else:
        _run_script(program[0])
    return 0


def _what(arguments: list[str]) -> tuple[bool, list[str]]:
    """Whether it is a module that is to run, and its name or path with its own arguments."""
    if arguments[:1] != ["run"]:
        raise _UsageError(f"the command is missing, or is not 'run'\n{_USAGE}")
    module = arguments[1:2] == ["-m"]
    program = arguments[2 if module else 1 :]
    if not program:
        raise _UsageError(f"there is no {'module' if module else 'script'} to run\n{_USAGE}")
    if program[0].startswith("-"):
        raise _UsageError(f"option {program[0]} is not known; settings come from the environment")
    if not module and not os.path.exists(program[0]):
        raise _UsageError(f"script {program[0]}: no such file")
    return module, program


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
    sys.exit(main(sys.argv[1:]))
