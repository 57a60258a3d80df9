"""What others have put into the modules of torch that make code: functions, methods, classes.

``CppVecOverrides.exp = mine`` changes what is made of any graph, and nothing that a graph, a table
or a namespace of operators would show. So all modules and classes of the packages that trace and
lower graphs are looked at. Whether something is torch's is decided by where its code lies.

There are forty thousand members. A look compares them with those of the last one, by what they are
and not by what they say that they equal. Only in a module or class that has changed is anything
asked about each that is new.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from operator import attrgetter, is_
from typing import NamedTuple

import _s3cache_autoload
from s3cache._importing import before_import, when_imported
from s3cache.graph._altered import remember_insides, stand_in_for
from s3cache.graph._constants import Tables, is_changed_value
from s3cache.graph._distribution import distribution_of, origin_of, origin_of_file, unwrap_patch
from s3cache.graph._identity import UnidentifiedError, content_of
from s3cache.graph._whose import ABSENT, is_foreign
from s3cache.torch_api import internals

__all__ = ["Member", "await_members", "replaced_members"]

# Whose functions and classes torch's modules import for their own use: what torch is built on.
_BUILT_ON = frozenset(
    """
    cuda expecttest filelock fsspec functorch jinja2 markupsafe mpmath networkx numpy optree
    packaging psutil pybind11 setuptools sympy torchgen tqdm triton typing_extensions
    """.split()  # noqa: SIM905 - nobody reads one word a line
)


# Tables among these are looked at by themselves.
_PLACES = (*_s3cache_autoload.PLACES, *internals.LATER_PLACES)


class Member(NamedTuple):
    """What stands in a module or a class of torch's in place of what torch has there.

    Attributes:
        place: the module and the name, or with the class in between.
    """

    place: str
    value: object


# What Dynamo adds to the module of a function that it compiled, such as ``torch.cond``. Only the
# code that it made of that function calls it.
_DYNAMOS = ("__compiled_fn_", "__resume_at_")


class _Table:
    """One module or class.

    Attributes:
        others: what of that, when it was last looked at, is not torch's, or not in its place.
    """

    def __init__(self, module: str, place: str, members: Mapping[str, object]) -> None:
        self.module = module
        self._place = place
        self._members = members
        self._values = members.values()
        self._last: list[object] = []
        self.others: list[Member] = []
        self._first: dict[str, object] = {}

    def take(self) -> None:
        """All that is there now is torch's."""
        self._first = dict(self._members)
        self._last = list(self._first.values())
        _codes.note(self._last)
        _constants.note(self._place, self._first)

    def has_changed(self) -> bool:
        """Whether anything is there that was not when it was last looked at, or is gone."""
        last = self._last
        return len(self._values) != len(last) or not all(map(is_, self._values, last))

    def survey(self, known: set[int]) -> None:
        """See for the first time what is there: what looks like torch's is.

        Args:
            known: ids of what is torch's, of objects that live; what is found to be is added.
        """
        now = dict(self._members)
        self.others = []
        for name, there in now.items():
            kind = type(there)
            if kind in _PLAIN or id(there) in known:
                continue
            # Nine of ten of the rest are asked about nothing else, as there are so many.
            if kind is types.FunctionType and (
                there.__closure__ is None  # type: ignore[attr-defined]
                and there.__code__.co_filename in _files  # type: ignore[attr-defined]
            ):
                continue
            value = unwrap_patch(there)
            if _is_others(value, is_first=True):
                self.others.append(Member(f"{self._place}.{name}", value))
            else:
                known.add(id(there))
        self._last = list(now.values())
        for other in self.others:
            del now[other.place.rpartition(".")[2]]
        self._first = now
        _codes.note(now.values())
        _constants.note(self._place, now)

    def look(self) -> None:
        """Ask whose is what torch has not put there."""
        now = dict(self._members)
        self.others = [
            Member(f"{self._place}.{name}", value)
            for name, there in now.items()
            if (value := unwrap_patch(there)) is not self._had(name)
            and not name.startswith(_DYNAMOS)
            and (
                _is_others(value, is_first=False)
                or self._is_moved(name, value)
                or is_changed_value(self._place, self.module, name, self._had(name), value)
            )
        ]
        self._last = list(now.values())

    def _had(self, name: str) -> object:
        """What torch has there itself: it may have been noted when a seam was there already."""
        return unwrap_patch(self._first.get(name, ABSENT))

    def _is_moved(self, name: str, value: object) -> bool:
        """Whether something of torch's stands in the place of something else that is torch's.

        What torch makes anew of a function bears its name.
        """
        old, new = (_named_by_itself(each) for each in (self._had(name), value))
        return None not in (old, new) and old != new


class _Codes:
    """The code of each function of torch's that was seen: another may be put into it.

    But for those that have defaults or a closure, of which as much is noted as of all that programs
    come by themselves.
    """

    def __init__(self) -> None:
        self._functions: list[types.FunctionType] = []
        self._codes: list[types.CodeType] = []
        self._noted: set[int] = set()  # ids of functions, which are kept

    def note(self, values: Iterable[object]) -> None:
        """What those of ``values`` that are functions have now is torch's."""
        if not self._noted:
            self._noted.update(map(id, _s3cache_autoload.insides.functions))
        with_more = []
        for value in values:
            kind = type(value)
            if kind is staticmethod or kind is classmethod:
                value = value.__func__  # type: ignore[attr-defined]
                kind = type(value)
            if kind is types.FunctionType and id(value) not in self._noted:
                self._noted.add(id(value))
                if _has_more(value):  # type: ignore[arg-type]
                    with_more.append(value)
                else:
                    self._functions.append(value)  # type: ignore[arg-type]
                    self._codes.append(value.__code__)  # type: ignore[attr-defined]
        remember_insides(with_more)

    def altered(self) -> list[Member]:
        """Those that have other code now."""
        if all(map(is_, map(_code, self._functions), self._codes)):
            return []
        return [
            Member(f"inside {function.__module__}.{function.__qualname__}", stand_in_for(function))
            for function, code in zip(self._functions, self._codes, strict=True)
            if function.__code__ is not code
        ]


def _has_more(function: types.FunctionType) -> bool:
    """Whether there is more to it than code, unless Python made it of text, as dataclasses have."""
    return not function.__code__.co_filename.startswith("<") and bool(
        function.__closure__ or function.__defaults__ or function.__kwdefaults__
    )


_code = attrgetter("__code__")
_codes = _Codes()
_constants = Tables()
_tables: list[_Table] = []
_others: list[Member] = []


def await_members() -> list[Callable[[], None]]:
    """Take note of what torch has as soon as its compiler is imported.

    Returns:
        Functions that take back what is still to come.
    """
    before: set[str] = set()

    def note() -> None:
        before.update(sys.modules if internals.COMPILER not in sys.modules else ())

    def take() -> None:
        # Nobody has touched what came with it. It is most there is, and this costs 10 ms less.
        fresh = sys.modules.keys() - before if before else ()
        _look(fresh)

    return [before_import(internals.COMPILER, note), when_imported(internals.COMPILER, take)]


def replaced_members() -> list[Member]:
    """What others have put there by now, and what of torch's own stands in another's place.

    Raises:
        UnidentifiedError: a module of torch's was replaced as a whole.
    """
    _refuse_other_modules()
    changed = [Member(part.place, part.value) for part in _constants.changed()]
    return _look() + _codes.altered() + changed


def _look(fresh: Container[str] = ()) -> list[Member]:
    """See what has changed.

    Args:
        fresh: modules that nobody can have changed yet.
    """
    global _others
    changed = [table for table in _tables if table.has_changed()]
    new = _new_tables()
    if not new and not changed:
        return _others
    for table in changed:
        table.look()
    known: set[int] = set()
    tables = filter(None, map(internals.contents, filter(internals.is_table, _PLACES)))
    _constants.leave_out([*tables, internals.side_effectful.get()])
    for table in new:
        if table.module in fresh:
            table.take()
        else:
            table.survey(known)
    _tables.extend(new)
    _others = list(itertools.chain.from_iterable(table.others for table in _tables))
    return _others


@atexit.register
def _forget() -> None:
    """torch takes itself apart in an order of its own at exit: nothing of it may outlive that."""
    global _codes, _constants
    _codes, _constants = _Codes(), Tables()
    _tables.clear()
    _modules.clear()
    _names.clear()
    _seen.clear()
    _others.clear()


# -- which modules and classes there are


_names: list[str] = []  # of all modules that were imported at the last look, in order
_seen: set[str] = set()  # of those at any look
_modules: dict[str, types.ModuleType] = {}  # of those that make code


def _new_tables() -> list[_Table]:
    """Those of modules that were imported since the last look."""
    found: list[_Table] = []
    for name in _new_names():
        module = sys.modules.get(name)
        if internals.makes_code(name) and type(module) is types.ModuleType and _is_of_torch(module):
            _modules[name] = module
            found.append(_Table(name, name, vars(module)))
            found += _classes(name, vars(module))
    return found


def _new_names() -> list[str]:
    """Of modules that were not there at any look. What is imported comes last."""
    names = list(sys.modules)
    count = len(_names)
    if internals.are_identical(names[:count], _names):
        new = names[count:]
    else:  # some were taken out
        new = [name for name in names if name not in _seen]
    _names[:] = names
    _seen.update(new)
    return new


def _refuse_other_modules() -> None:
    """Modules in the places of torch's: torch imports much as it works, and finds those."""
    if all(map(is_, map(sys.modules.get, _modules), _modules.values())):
        return
    for name, module in _modules.items():
        if sys.modules.get(name, module) is not module:
            raise UnidentifiedError(f"{name} was replaced by a module that may have anything in it")


def _is_of_torch(module: types.ModuleType) -> bool:
    """What Inductor has made lies in modules of such names, too."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and file.startswith(internals.torch_directory())


def _classes(module: str, members: Mapping[str, object]) -> Iterator[_Table]:
    for name, value in list(members.items()):
        if isinstance(value, type) and value.__module__ == module:
            place = f"{module}.{name}"
            if place != internals.EXCHANGED:
                yield _Table(module, place, vars(value))


# -- whose something is

_files: set[str] = set()  # of known functions


def _named_by_itself(value: object) -> str | None:
    """The name of a function, class or module of torch's; ``None`` for all else."""
    while isinstance(value, (staticmethod, classmethod, functools._lru_cache_wrapper)):
        value = value.__wrapped__
    if type(value) is types.FunctionType:
        function: types.FunctionType = value
        return function.__qualname__ if internals.has_code_of_torch(function) else None
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    return f"module {value.__name__}" if type(value) is types.ModuleType else None


# What is no code, and what is looked at by itself.
_DATA = (str, int, bool, float, dict, list, tuple, set, frozenset, type(None))
_PLAIN = frozenset(
    (*_DATA, types.ModuleType, types.GetSetDescriptorType, ModuleSpec, SourceFileLoader)
)


def _is_others(value: object, *, is_first: bool) -> bool:
    """Whether a member is somebody else's than torch's.

    Args:
        is_first: whether its module was seen now for the first time: it has imported functions of
            others then, and made some that lie in no file.
    """
    kind = type(value)
    if kind is types.FunctionType:
        return _is_others_function(value, is_first)  # type: ignore[arg-type]
    if kind in (staticmethod, classmethod):
        return _is_others(value.__func__, is_first=is_first)  # type: ignore[attr-defined]
    if kind is property:
        parts = (value.fget, value.fset, value.fdel)  # type: ignore[attr-defined]
        return any(_is_others(part, is_first=is_first) for part in parts)
    if isinstance(value, type):
        return _is_others_class(value, is_first)
    if kind is types.ModuleType:
        return not is_first and not origin_of(value).is_versioned
    if kind is functools.partial:
        return _is_others(value.func, is_first=is_first)  # type: ignore[attr-defined]
    if isinstance(value, (functools._lru_cache_wrapper, types.MethodType)):
        inner: object = getattr(value, "__wrapped__", None) or getattr(value, "__func__", None)
        return _is_others(inner, is_first=is_first)
    return callable(value) and _is_others_object(value, is_first)


def _is_others_object(value: object, is_first: bool) -> bool:
    kind = type(value)
    if kind.__module__ == "unittest.mock":  # what such a one does is in no code
        return True
    return not _is_known_module(kind.__module__) if is_first else is_foreign(value, "")


def _is_others_function(function: types.FunctionType, is_first: bool) -> bool:
    if not is_first:
        return is_foreign(function, "")
    if not _is_known(function):
        return True
    # Of what torch's decorators, and Python's, wrap, it is who wrote that.
    cells = function.__closure__ or ()
    inner = [content_of(cell) for cell in cells]
    return any(type(each) is types.FunctionType and not _is_known(each) for each in inner)


def _is_known(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename
    if file in _files:
        return True
    if file.startswith("<") and not file.startswith("<frozen "):
        return _is_generated(function)
    of_torch = file.startswith(internals.torch_directory())
    installed = distribution_of(file) in _BUILT_ON or _is_of_built_on(function)
    if of_torch or installed or origin_of_file(file).is_versioned:
        _files.add(file)
        return True
    return False


def _is_of_built_on(function: types.FunctionType) -> bool:
    """The same by the module: not all that is imported was installed by pip, with a record."""
    name = str(function.__globals__.get("__name__"))
    module = sys.modules.get(name)
    return (
        name.partition(".")[0] in _BUILT_ON
        and module is not None
        and vars(module) is function.__globals__
    )


def _is_generated(function: types.FunctionType) -> bool:
    """Whether torch, or Python for it, has made it of text.

    That text is of no file, and often of no module. What others have made so, and put there before
    the first look, is taken for torch's.
    """
    name = function.__globals__.get("__name__")
    module = sys.modules.get(str(name))
    if module is not None and vars(module) is function.__globals__:
        return origin_of(module).is_versioned
    return name is None or str(name).startswith("namedtuple_")


def _is_others_class(kind: type, is_first: bool) -> bool:
    if is_first:
        return not _is_known_module(kind.__module__)
    if origin_of(kind).is_versioned:
        return False
    # Torch makes some in functions, where nobody finds them by their names.
    functions = [each for each in vars(kind).values() if type(each) is types.FunctionType]
    return not functions or not all(map(_is_known, functions))


@functools.cache
def _is_known_module(name: str) -> bool:
    root = name.partition(".")[0]
    if root in _BUILT_ON or root in sys.stdlib_module_names:
        return True
    module = sys.modules.get(name)
    return module is not None and origin_of(module).is_versioned
