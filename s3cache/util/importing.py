"""Run callbacks around the import of a module, without importing it.

The modules are large, so garbage is hardly ever collected during their import: an import makes many
permanent objects, and each collection would go through them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias, cast

_Callback: TypeAlias = Callable[[], None]


def before_import(name: str, callback: _Callback) -> _Callback:
    """Call ``callback`` right before the first import of module ``name``; now, if it is imported.

    It runs on the importing thread. The import statement raises its errors. Returns a function that
    cancels this, if it has not happened yet.
    """
    if name in sys.modules:
        callback()
        return lambda: None
    return _Finder(name, callback, None).withdraw


def when_imported(name: str, callback: _Callback) -> _Callback:
    """Do the same right after the import, before the import statement returns.

    ``callback`` must not raise: the importing program would get the error.
    """
    if name in sys.modules:
        import_module(name)  # waits if another thread is importing it
        callback()
        return lambda: None
    return _Finder(name, None, callback).withdraw


def without_collections(names: Iterable[str]) -> _Callback:
    """Avoid garbage collections during the imports of modules.

    Returns a function that cancels this for modules that are not imported yet.
    """
    finders = [_Finder(each, None, None) for each in names if each not in sys.modules]

    def cancel() -> None:
        for each in finders:
            each.withdraw()

    return cancel


def import_later(importer: str, name: str) -> _Callback:
    """Make ``importer`` import ``name`` at its first use in a function, not at its own import.

    Both are names of modules. If the import of ``importer`` needs ``name`` for more than
    annotations of functions, it is executed again, normally. Returns a function that cancels this.
    """
    if importer in sys.modules or name in sys.modules:
        return lambda: None
    return _Finder(importer, None, None, name).withdraw


class _Finder(MetaPathFinder):
    """Waits on the import path for one module, and leaves the path before it acts."""

    def __init__(
        self, name: str, before: _Callback | None, after: _Callback | None, later: str = ""
    ) -> None:
        self._name, self._before, self._after, self._later = name, before, after, later
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
        if self._before:
            self._before()
        # Ask all finders: the callback may have added one before the others.
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, self._after)
            if self._later and isinstance(spec.loader, SourceLoader):
                _leave_out(self._later, spec.loader)
        return spec


def _call_after(loader: Loader, callback: _Callback | None) -> None:
    """Make ``loader``, which belongs to one module, call back after it has executed the module."""
    execute = loader.exec_module

    def execute_and_call(module: ModuleType) -> None:
        loader.exec_module = execute  # type: ignore[method-assign]
        with _no_collections():
            execute(module)
            if callback:
                callback()

    loader.exec_module = execute_and_call  # type: ignore[method-assign]


# A threshold that few imports reach, and that we recognize as ours. If a program reads it
# meanwhile, in any thread, and sets it again later, there are still collections. gc.disable() would
# not work: if a program calls it meanwhile, we would undo it.
_FAR = 1_000_003
_usual = 0  # the program's threshold, while ours is set
_FEW = 1_000  # Python 3.12 itself freezes 375 objects; a program that does freezes many more


@contextmanager
def _no_collections() -> Iterator[None]:
    global _usual
    threshold = gc.get_threshold()[0]
    if not (0 < threshold < _FAR and gc.isenabled()):  # no collections; or a nested import
        yield
        return
    gc.collect(1)  # do not keep existing garbage with the new objects
    _usual = threshold
    try:
        gc.set_threshold(_FAR)
        yield
    finally:
        try:
            if gc.get_freeze_count() < _FEW:  # else the program has frozen objects
                # To the oldest generation: a collection of the youngest would go through it all.
                gc.freeze()
                gc.unfreeze()
        finally:
            _collect_as_usual()


def _collect_as_usual() -> None:
    if gc.get_threshold()[0] == _FAR:  # else the program has set its own
        gc.set_threshold(_usual)


os.register_at_fork(after_in_child=_collect_as_usual)  # the child may lack the importing thread


# -- deferred imports of modules


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

    def __setattr__(self, attribute: str, value: object) -> None:
        setattr(import_module(self.__name__), attribute, value)

    def __delattr__(self, attribute: str) -> None:
        delattr(import_module(self.__name__), attribute)


class _Annotation(str):
    """An attribute of the stand-in while the importer is executed: usable in annotations only."""

    __slots__ = ()


def _leave_out(name: str, loader: SourceLoader) -> None:
    """Make ``loader`` execute its module without importing ``name``, if possible."""
    execute, get_code = loader.exec_module, loader.get_code

    def execute_without(module: ModuleType) -> None:
        def get_rest(fullname: str) -> CodeType | None:
            code, names = get_code(fullname), vars(module)
            before = {**names}
            if code is None or name in sys.modules or find_spec(name) is None:
                return code
            try:
                _execute_without(name, code, names)
            except Exception:  # noqa: BLE001 - as ever then
                names.clear()
                names.update(before)
                return code
            return compile("", code.co_filename, "exec")

        loader.exec_module = execute  # type: ignore[method-assign]
        loader.get_code = get_rest  # type: ignore[method-assign]
        try:
            execute(module)
        finally:
            loader.get_code = get_code  # type: ignore[method-assign]

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
