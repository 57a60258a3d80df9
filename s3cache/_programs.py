"""Running a program in this process as the interpreter would have run it by itself."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

__all__ = ["run_program"]


def run_program(program: list[str], *, module: bool) -> None:
    """Run a script, or a module as with ``-m``, with the arguments that follow its name."""
    sys.argv = program
    if module:
        _become_main()
        # What the interpreter does for -m.
        runpy._run_module_as_main(program[0])  # type: ignore[attr-defined]
    elif os.path.isdir(program[0]) or program[0].endswith((".zip", ".pyz")):
        runpy.run_path(program[0], run_name="__main__")
    else:
        _run_script(program[0])


def _become_main() -> ModuleType:
    """A fresh ``__main__``, which stays: what is pickled or runs at exit finds it there."""
    main_module = ModuleType("__main__")
    sys.modules["__main__"] = main_module
    return main_module


def _run_script(path: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main_module = _become_main()
    main_module.__file__ = os.path.join(os.getcwd(), path)  # as it is, dots and all
    main_module.__loader__ = SourceFileLoader("__main__", path)
    main_module.__dict__.update(__builtins__=__builtins__, __cached__=None, __annotations__={})
    with open(path, "rb") as file:
        code = compile(file.read(), main_module.__file__, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)  # noqa: S102 - it is what we were asked to run
