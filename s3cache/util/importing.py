"""Run callbacks around the import of a module, without importing it; wait for the first compile."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TypeAlias

_Callback: TypeAlias = Callable[[], None]


def before_import(name: str, callback: _Callback) -> _Callback:
    """Call ``callback`` right before the first import of module ``name``; now, if it is imported.

    It runs on the importing thread. The import statement raises its errors. Returns a function that
    cancels this, if it has not happened yet.
    """
    if name in sys.modules:
        callback()
        return lambda: None
    return _Finder(name, before=callback).withdraw


def when_imported(name: str, callback: _Callback) -> _Callback:
    """Do the same right after the import, before the import statement returns.

    ``callback`` must not raise: the importing program would get the error.
    """
    if name in sys.modules:
        import_module(name)  # waits if another thread is importing it
        callback()
        return lambda: None
    return _Finder(name, after=callback).withdraw


def when_found(name: str, change: Callable[[Loader], object]) -> _Callback:
    """Call ``change`` with the loader of module ``name`` before it executes the module.

    Nothing happens if the module is imported already. Returns a function that cancels this.
    """
    return (lambda: None) if name in sys.modules else _Finder(name, change=change).withdraw


class _Finder(MetaPathFinder):
    """Waits on the import path for one module, and leaves the path before it acts."""

    def __init__(
        self,
        name: str,
        *,
        before: _Callback = lambda: None,
        after: _Callback = lambda: None,
        change: Callable[[Loader], object] = lambda _: None,
    ) -> None:
        self._name, self._before, self._after, self._change = name, before, after, change
        sys.meta_path.insert(0, self)

    def withdraw(self) -> None:
        if self in sys.meta_path:
            # A new list: a thread that is iterating over the old one must not skip a finder.
            sys.meta_path = [each for each in sys.meta_path if each is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.withdraw()
        self._before()
        # Ask all finders: the callback may have added one before the others.
        spec = find_spec(fullname)
        if spec is not None and (loader := spec.loader) is not None:
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                loader.exec_module = execute  # type: ignore[method-assign]
                execute(module)
                self._after()

            loader.exec_module = execute_and_call  # type: ignore[method-assign]
            self._change(loader)
        return spec


# -- the first compile of a process, which enables the cache that its environment names


class FirstCompile:
    """A wait that ends with the first compile, or when the program chooses a cache itself."""

    def __init__(self) -> None:
        self._enable: Callable[[], object] | None = None  # while this waits
        self._undo = contextlib.ExitStack()
        self._is_cancelled = False

    def wait(self, enable: Callable[[], object]) -> contextlib.ExitStack | None:
        """Call ``enable`` at the end, after undoing what the caller adds to the stack.

        Returns None, and does not wait, if the program has chosen before.
        """
        if self._is_cancelled:
            return None
        self._enable = enable
        return self._undo

    def end(self) -> None:
        """Enable the cache if this waits, unless the process is ending."""
        if (enable := self._enable) is not None and threading.main_thread().is_alive():
            self._enable = None
            self._undo.close()
            enable()

    def cancel(self) -> None:
        """Leave the choice to the program: the environment has no say any more."""
        self._is_cancelled, self._enable = True, None
        self._undo.close()


first_compile = FirstCompile()
