"""Running a program in this process as the interpreter would have run it by itself.

What it does is in ``pymain_run_python`` and ``pyrun_file`` of CPython
(https://github.com/python/cpython/blob/main/Modules/main.c).

Nothing is imported here at first: what lies in the current directory could come in the way of the
standard library, see :func:`leave_directory`.
"""

from __future__ import annotations

import sys

__all__ = ["leave_directory", "leave_script", "run_command", "run_input", "run_module", "run_path"]


_has_left: list[bool] = []


def leave_directory() -> None:
    """Take the current directory, which ``-m`` puts there, from the path until the program runs.

    A program that is started as a script does not import from it, and nothing of ours shall.
    """
    import os  # which the interpreter has, too

    if not _is_safe() and sys.path[:1] == [os.getcwd()] and not _has_left:
        del sys.path[0]
        _has_left.append(True)


def leave_script() -> None:
    """Take the directory of the installed command from the path: no program imports from there."""
    import os

    here = os.path.dirname(os.path.realpath(sys.argv[0]))
    if not _is_safe() and sys.path[:1] == [here]:
        del sys.path[0]


def run_path(program: list[str]) -> None:
    """Run what ``python program...`` would: a script, compiled or not, a directory or an archive.

    The arguments follow its name.
    """
    import os
    import pkgutil
    import runpy

    sys.argv = program
    path = program[0]
    if pkgutil.get_importer(path) is not None:  # a directory, or an archive of whatever name
        sys.path.insert(0, os.path.join(os.getcwd(), path))
        _become_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    if not _is_safe():
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    _run_file(path)


def run_module(program: list[str]) -> None:
    """Run a module as with ``-m``, with the arguments that follow its name."""
    import os
    import runpy

    sys.argv = program
    if not _is_safe():
        sys.path.insert(0, os.getcwd())
    _become_main()
    runpy._run_module_as_main(program[0])  # type: ignore[attr-defined]


def run_command(program: list[str]) -> None:
    """Run code as with ``-c``, with the arguments that follow it."""
    code = program[0]
    sys.argv = ["-c", *program[1:]]
    _run_text(code, "<string>")


def run_input(program: list[str]) -> None:
    """Run what comes from standard input, up to its end, as ``python -`` does."""
    sys.argv = program
    _run_text(sys.stdin.buffer.read(), "<stdin>", __file__="<stdin>", __cached__=None)


def _is_safe() -> bool:
    """Whether the interpreter was told to put nothing before its own path, by ``-I`` or ``-P``."""
    return bool(getattr(sys.flags, "safe_path", False) or sys.flags.isolated)


def _become_main() -> dict[str, object]:
    """A fresh ``__main__``, which stays: what is pickled or runs at exit finds it there."""
    from types import ModuleType

    main_module = ModuleType("__main__")
    sys.modules["__main__"] = main_module
    main_module.__dict__.update(__builtins__=__builtins__, __annotations__={})
    return main_module.__dict__


def _run_text(source: str | bytes, name: str, **names: object) -> None:
    import importlib.machinery

    if not _is_safe():
        sys.path.insert(0, "")
    main_globals = _become_main()
    main_globals.update(__loader__=importlib.machinery.BuiltinImporter, **names)
    exec(compile(source, name, "exec", dont_inherit=True), main_globals)  # noqa: S102


def _run_file(path: str) -> None:
    import importlib.machinery
    import importlib.util
    import os

    main_globals = _become_main()
    file = os.path.join(os.getcwd(), path)  # as it is, dots and all
    with open(path, "rb") as opened:
        source = opened.read()
    if path.endswith(".pyc") or source[:2] == importlib.util.MAGIC_NUMBER[:2]:
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        main_globals.update(__file__=file, __cached__=None, __loader__=loader)
        code = loader.get_code("__main__")
        assert code is not None
    else:
        loader_of_source = importlib.machinery.SourceFileLoader("__main__", path)
        main_globals.update(__file__=file, __cached__=None, __loader__=loader_of_source)
        code = compile(source, file, "exec", dont_inherit=True)
    exec(code, main_globals)  # noqa: S102 - it is what we were asked to run
