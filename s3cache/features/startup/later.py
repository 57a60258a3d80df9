"""Imports of modules at their first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.abc import Loader, SourceLoader
from importlib.util import find_spec
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

from s3cache.util.importing import when_found


def import_later(importer: str, name: str) -> Callable[[], None]:
    """Make ``importer`` import ``name`` at its first use in a function, not at its own import.

    Both are names of modules. If the import of ``importer`` needs ``name`` for more than
    annotations of functions, it is executed again, normally. Returns a function that cancels this.
    """
    if name in sys.modules:
        return lambda: None

    def change(loader: Loader) -> None:
        if isinstance(loader, SourceLoader):
            _leave_out(name, loader)

    return when_found(importer, change)


class _StandIn(ModuleType):
    """A stand-in for a module in another module's namespace; imports it at the first use."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self)["annotations"] = []

    def __getattr__(self, attribute: str) -> object:
        found = vars(self).get("annotations")
        if found is None:
            return getattr(import_module(self.__name__), attribute)
        found.append(_Annotation(attribute))
        return cast("object", found[-1])


class _Annotation(str):
    """An attribute of the stand-in while the importer is executed: usable in annotations only."""

    __slots__ = ()


def _leave_out(name: str, loader: SourceLoader) -> None:
    """Make ``loader`` execute its module without importing ``name``, if possible."""
    execute = loader.exec_module

    def execute_without(module: ModuleType) -> None:
        loader.exec_module = execute  # type: ignore[method-assign]
        code, names = loader.get_code(module.__name__), vars(module)
        before = {**names}
        if code is not None and name not in sys.modules and find_spec(name) is not None:
            try:
                _execute_without(name, code, names)
            except Exception:  # noqa: BLE001 - as ever then
                names.clear()
                names.update(before)
            else:
                return
        execute(module)

    loader.exec_module = execute_without  # type: ignore[method-assign]


def _execute_without(name: str, code: CodeType, names: dict[str, Any]) -> None:
    stand_in, said = _StandIn(name), f"{name}, later"
    code = code.replace(co_names=tuple(said if each == name else each for each in code.co_names))
    sys.modules[said] = stand_in
    try:
        exec(code, names)  # noqa: S102 - as a loader does
    finally:
        del sys.modules[said]
    (alias,) = (each for each, value in names.items() if value is stand_in)
    found = vars(stand_in).pop("annotations")
    for function in _functions_in(names) if found else ():
        for argument, value in function.__annotations__.items():
            if type(value) is _Annotation:  # as if annotations were not evaluated
                function.__annotations__[argument] = f"{alias}.{value}"
                found.remove(value)
    if found or alias == said:  # it needs more of the module, or uses this name
        raise ValueError(name)


def _functions_in(names: Mapping[str, Any]) -> Iterator[FunctionType]:
    for holder in (names, *(vars(each) for each in names.values() if isinstance(each, type))):
        for value in holder.values():
            if type(value) in (staticmethod, classmethod):
                value = value.__func__
            elif type(value) is property:
                value = value.fget
            if type(value) is FunctionType and value.__globals__ is names:
                yield value
