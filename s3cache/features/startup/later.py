"""Imports of modules at their first use."""

from __future__ import annotations
import __future__

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import Loader, SourceLoader
from importlib.util import find_spec
from types import ModuleType
from typing import cast

from s3cache.util.importing import when_found


def import_later(importer: str, name: str) -> Callable[[], None]:
    """Make ``importer`` import ``name`` at its first use, not at its own import.

    Both are names of modules. A use is any attribute, except in annotations: those of the importer
    are not evaluated. Returns a function that cancels this.
    """
    if name in sys.modules:
        return lambda: None

    def change(loader: Loader) -> None:
        if isinstance(loader, SourceLoader):
            execute = partial(_execute, name, loader, loader.exec_module)
            loader.exec_module = execute  # type: ignore[method-assign]

    return when_found(importer, change)


class _StandIn(ModuleType):
    """A stand-in for a module, which imports it at the first use."""

    def __getattr__(self, attribute: str) -> object:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), attribute)


def _execute(
    name: str, loader: SourceLoader, execute: Callable[[ModuleType], None], module: ModuleType
) -> None:
    loader.exec_module = execute  # type: ignore[assignment, method-assign]
    source, names = loader.get_source(module.__name__), vars(module)
    if source is None or name in sys.modules or find_spec(name) is None:
        execute(module)
        return
    flags = __future__.annotations.compiler_flag
    code = compile(source, cast("str", module.__file__), "exec", flags, dont_inherit=True)
    stand_in = sys.modules[name] = _StandIn(name)
    try:
        exec(code, names)  # noqa: S102 - as a loader does
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        elif name in sys.modules:  # it was needed at once
            names.update({k: sys.modules[name] for k, v in names.items() if v is stand_in})
    # The rest of the import, for those who notice what torch imports.
    rest, get_code = compile("", code.co_filename, "exec"), loader.get_code
    loader.get_code = lambda _: rest  # type: ignore[assignment, method-assign]
    try:
        execute(module)
    finally:
        loader.get_code = get_code  # type: ignore[method-assign]
