"""Act around the import of a module, without importing it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TypeAlias

_Callback: TypeAlias = Callable[[], None]
_Execute: TypeAlias = Callable[[ModuleType], None]


def before_import(name: str, callback: _Callback) -> _Callback:
    """Call ``callback`` right before module ``name`` is first imported; now, if it has been.

    It runs on the importing thread. What it raises, the import statement raises. Returns a function
    that cancels this, if it has not happened yet.
    """
    if name in sys.modules:
        callback()
        return lambda: None
    return _Finder(name, before=callback).withdraw


def when_imported(name: str, callback: _Callback) -> _Callback:
    """Do the same right after the import, before the import statement returns.

    ``callback`` must not raise: the program that imports would see it.
    """
    if name in sys.modules:
        import_module(name)  # waits, should another thread be importing it just now
        callback()
        return lambda: None

    def execute_and_call(execute: _Execute, module: ModuleType) -> None:
        execute(module)
        callback()

    return _Finder(name, around=execute_and_call).withdraw


def without_collections(*names: str) -> _Callback:
    """Have no cyclic garbage collection start while one of the modules is first imported.

    An import makes many objects that stay, and each collection goes through them. Returns a
    function that cancels this for the modules that are not imported by then.
    """
    finders = [_Finder(each, around=_collect_later) for each in names if each not in sys.modules]
    return lambda: [each.withdraw() for each in finders].clear()


class _Finder(MetaPathFinder):
    """Wait on the import path for one module, and leave the path before anything happens."""

    def __init__(
        self,
        name: str,
        *,
        before: _Callback | None = None,
        around: Callable[[_Execute, ModuleType], None] | None = None,
    ) -> None:
        self._name, self._before, self._around = name, before, around
        sys.meta_path.insert(0, self)

    def withdraw(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.withdraw()
        if self._before:
            self._before()
        # All finders are asked: the callback may have put one of its own before the others.
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None and self._around:
            _wrap(spec.loader, self._around)
        return spec


def _wrap(loader: Loader, around: Callable[[_Execute, ModuleType], None]) -> None:
    """Have ``around`` execute the one module of ``loader``."""
    execute = loader.exec_module

    def execute_within(module: ModuleType) -> None:
        loader.exec_module = execute  # type: ignore[method-assign]
        around(execute, module)

    loader.exec_module = execute_within  # type: ignore[method-assign]


# A threshold that no process reaches, and that says who has set it. gc.disable() would not: a
# program that calls it meanwhile, in any thread, would find it undone.
_NEVER = 2_013_265_921
_usual = 0  # threshold of the program


def _collect_later(execute: _Execute, module: ModuleType) -> None:
    global _usual
    threshold = gc.get_threshold()[0]
    if threshold == _NEVER:  # within another such import, or beside it
        execute(module)
        return
    _usual = threshold
    gc.set_threshold(_NEVER)
    try:
        execute(module)
    finally:
        _collect_as_usual()


def _collect_as_usual() -> None:
    if gc.get_threshold()[0] == _NEVER:  # else the program has set its own
        gc.set_threshold(_usual)


os.register_at_fork(after_in_child=_collect_as_usual)  # the importing thread may not be in it
