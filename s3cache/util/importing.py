"""Call back around the import of a module, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["before_import", "is_being_imported", "when_imported"]


def before_import(name: str, callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` right before module ``name`` is first imported; now, if it has been.

    It runs on the importing thread. What it raises, the import statement raises.

    Returns:
        A function that cancels this, if it has not happened yet.
    """
    if name in sys.modules:
        callback()
        return lambda: None
    return _Finder(name, before=callback).withdraw


def when_imported(name: str, callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` right after module ``name`` is imported; now, if it has been.

    It runs on the importing thread, before the import statement returns. ``callback`` must not
    raise: the program that imports would see it.

    Returns:
        A function that cancels this, if it has not happened yet.
    """
    if name in sys.modules:
        import_module(name)  # waits, should another thread be importing it just now
        callback()
        return lambda: None
    return _Finder(name, after=callback).withdraw


def is_being_imported(name: str) -> bool:
    """Return whether module ``name`` is there, but its code has not run to the end."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _nothing() -> None:
    pass


class _Finder(MetaPathFinder):
    """Wait on the import path for one module, and leave the path before anything happens."""

    def __init__(
        self,
        name: str,
        *,
        before: Callable[[], None] = _nothing,
        after: Callable[[], None] = _nothing,
    ) -> None:
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
        self._before()
        # All finders are asked: the callback may have put one of its own before the others.
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._after)
        return spec


class _Loader(Loader):
    """Loads as the real loader does, then calls back; other attributes are the real loader's."""

    def __init__(self, real: Loader, callback: Callable[[], None]) -> None:
        self._real = real
        self._callback = callback

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._callback()
