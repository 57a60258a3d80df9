"""Run a program in a process of a :class:`~s3cache.testing.Machine`, and report on it.

``python -m s3cache.testing._runner REPORT run|module|call PROGRAM ...``; the report is one JSON
object with what the function returned and what the cache counted.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import sys
from collections.abc import Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any

_report: dict[str, Any] = {"result": None, "stats": None}


def _main(path: str, how: str, *program: str) -> None:
    # Ours runs after s3cache's own exit, which finishes the uploads: those are counted too.
    atexit.register(_write, path, os.getpid())
    if how == "call":
        function, arguments = program
        _report["result"] = _call(function, json.loads(arguments))
    else:
        sys.argv = [*program]
        # It stays when the program has ended: what is pickled or runs at exit looks there.
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        if how == "module":
            runpy._run_module_as_main(program[0])  # type: ignore[attr-defined]
            return
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
        main.__file__ = program[0]
        with open(program[0], "rb") as file:
            code = compile(file.read(), program[0], "exec", dont_inherit=True)
        exec(code, main.__dict__)  # noqa: S102 - it is what we were asked to run


def _call(name: str, arguments: list[Any]) -> object:
    module, _, attributes = name.partition(":")
    function: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        function = getattr(function, attribute)
    result: object = function(*arguments)
    json.dumps(result)  # what JSON cannot hold is an error of the call, and not of the exit
    return result


def _write(path: str, process: int) -> None:
    if os.getpid() != process:  # a forked child that leaves as if it were the program
        return
    if (caches := sys.modules.get("s3cache.cache")) and (cache := caches.current_cache()):
        _report["stats"] = cache.stats()
    with open(path, "w", encoding="utf-8") as file:
        json.dump(_report, file, default=_plain)


def _plain(value: Any) -> object:
    """Return records and read-only mappings as JSON has them."""
    if isinstance(value, Mapping):
        return dict(value)
    return {field.name: getattr(value, field.name) for field in fields(value)}


if __name__ == "__main__":
    _main(*sys.argv[1:])
