"""Call back around the import of a module, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TypeAlias

_Callback: TypeAlias = Callable[[], None]


def before_import(name: str, callback: _Callback) -> _Callback:
    """Call ``callback`` right before module ``name`` is first imported; now, if it has been.

    It runs on the importing thread. What it raises, the import statement raises. Returns a function
    that cancels this, if it has not happened yet.
    """
    if name in sys.modules:
        callback()
        return lambda: None
    return _Finder(name, callback, None).withdraw


def when_imported(name: str, callback: _Callback) -> _Callback:
    """Do the same right after the import, before the import statement returns.

    ``callback`` must not raise: the program that imports would see it.
    """
    if name in sys.modules:
        import_module(name)  # waits, should another thread be importing it just now
        callback()
        return lambda: None
    return _Finder(name, None, callback).withdraw


class _Finder(MetaPathFinder):
    """Wait on the import path for one module, and leave the path before anything happens."""

    def __init__(self, name: str, before: _Callback | None, after: _Callback | None) -> None:
        self._name, self._before, self._after = name, before, after
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
        if spec is not None and spec.loader is not None and self._after:
            _call_after(spec.loader, self._after)
        return spec


def _call_after(loader: Loader, callback: _Callback) -> None:
    """Have ``loader``, which is of one module, call back once it has executed that module."""
    execute = loader.exec_module

    def execute_and_call(module: ModuleType) -> None:
        loader.exec_module = execute  # type: ignore[method-assign]
        execute(module)
        callback()

    loader.exec_module = execute_and_call  # type: ignore[method-assign]
