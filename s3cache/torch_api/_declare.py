"""Declare names of torch's internals: where each is and since which release, and survey them.

A declaration binds to the installed torch when it is first used, or in :func:`bind_declarations`;
nothing here imports torch before. Values are read each time, so that a name that somebody replaces
in torch is seen.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType
from typing import Any, Generic, TypeAlias, TypeVar

from s3cache.errors import UnsupportedTorchError
from s3cache.torch_api.protocols import Function

__all__ = [
    "AnyClass",
    "AnyFunction",
    "AnyObject",
    "Declaration",
    "Fields",
    "Flag",
    "Internal",
    "Predicate",
    "Release",
    "Row",
    "Shape",
    "Words",
    "bind_declarations",
    "check_names",
    "declarations",
    "installed_release",
    "installed_version",
    "require",
    "survey",
]

T = TypeVar("T")

#: Major and minor version: a declaration holds for all patch releases of one.
Release: TypeAlias = tuple[int, int]

_ALWAYS: Release = (0, 0)
_ABSENT = object()
_declarations: list[Declaration] = []


@functools.cache
def installed_version() -> str:
    """Return torch's version, without importing it; ``"(none)"`` without torch."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "(none)"


@functools.cache
def installed_release() -> Release:
    """Return the installed release; (0, 0) where its version is none or not a number."""
    numbers = re.match(r"(\d+)\.(\d+)", installed_version())
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One declared name, against the installed torch.

    Attributes:
        name: where it is.
        releases: those that are declared to have it.
        expected: whether the installed one is among them.
        present: whether the installed one has it.
        feature: what needs it, if the rest of s3cache does not.
    """

    name: str
    releases: str
    expected: bool
    present: bool
    feature: str = ""


@dataclass(eq=False)
class Declaration:
    """One or more names at one place of torch, and the first release that has them.

    Attributes:
        place: ``"module:path"``, or a module.
        since: the first release that has it, if the oldest supported one does not.
        instead: what takes its place in releases before.
        feature: the only thing that needs it, and that is off without it. A name without a feature
            is required: there is no cache without it.
    """

    place: str
    _: KW_ONLY
    since: Release = _ALWAYS
    instead: str = ""
    feature: str = ""

    def __post_init__(self) -> None:
        _declarations.append(self)

    @property
    def expected(self) -> bool:
        """Whether the installed release has it, by this declaration."""
        return installed_release() >= self.since

    def bind(self) -> None:
        """Find it in the installed torch.

        Raises:
            UnsupportedTorchError: it is expected there, and is not.
        """

    def rows(self) -> Iterator[Row]:
        """Yield a row for each name. Imports torch's compiler."""
        raise NotImplementedError

    def _row(self, name: str, since: Release, *, present: bool) -> Row:
        return Row(name, _releases(since), installed_release() >= since, present, self.feature)


@dataclass(eq=False)
class Internal(Declaration, Generic[T]):
    """A function, class, module, constant or option of torch.

    Attributes:
        works: tells whether it does what we use it for, where that can be tried.
        get: returns its value now, or raises :class:`UnsupportedTorchError` where this torch
            lacks it.
        find: the same, but ``None`` in a release that is declared not to have it.
    """

    _: KW_ONLY
    works: Callable[[T], bool] | None = None
    get: Callable[[], T] = field(init=False, repr=False)
    find: Callable[[], T | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.get, self.find = self._bind_and_get, self._bind_and_find

    def owner(self) -> tuple[object, str]:
        """Return what to set which attribute of, in order to replace it.

        Raises:
            UnsupportedTorchError: this torch lacks it.
        """
        if not self.expected:
            instead = f"; instead: {self.instead}" if self.instead else ""
            raise UnsupportedTorchError(
                f"{self.place} is of torch {_releases(self.since)}, not of {installed_version()}"
                f"{instead}"
            )
        return _locate(self.place)

    def bind(self) -> None:
        """Find it in the installed torch; from then on to get it is one ``getattr``."""
        self.get, self.find = self._bind_and_get, self._bind_and_find
        if self.expected:
            self.get = self.find = functools.partial(getattr, *self.owner())
        else:
            self.find = type(None)  # which returns None when it is called

    def rows(self) -> Iterator[Row]:
        """Yield its row."""
        found: Any = _find(self.place)
        works = found is not _ABSENT and (self.works is None or self.works(found))
        yield self._row(self.place, self.since, present=works)

    def _bind_and_get(self) -> T:
        self.owner()  # raises where this torch has none
        self.bind()
        return self.get()

    def _bind_and_find(self) -> T | None:
        self.bind()
        return self.find()


class AnyFunction(Internal[Function[Any]]):
    """A function or method of which nothing more is said."""


class AnyClass(Internal[type[Any]]):
    """A class of which nothing more is said."""


class AnyObject(Internal[Any]):
    """An object of which nothing more is said."""


class Predicate(Internal[Function[bool]]):
    """A function that returns whether something is so."""


class Flag(Internal[bool]):
    """An option that is on or off."""


@dataclass(eq=False)
class Fields(Declaration):
    """Attributes that are read, by name, off a module or off objects of a class.

    Attributes:
        place: the class or module.
        text: names of the attributes, separated by space.
        added: those that not every release has, and the first one that does.
    """

    text: str
    _: KW_ONLY
    added: Mapping[str, Release] = field(default_factory=dict)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names, in their order."""
        return tuple(self.text.split())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    @functools.cached_property
    def present(self) -> frozenset[str]:
        """The names that the installed release has."""
        release = installed_release()
        return frozenset(name for name in self if release >= self.added.get(name, self.since))

    def rows(self) -> Iterator[Row]:
        """Yield a row for each name."""
        found = _find(self.place)
        for name in self.names:
            present = found is not _ABSENT and self._is_in(found, name)
            since = self.added.get(name, self.since)
            yield self._row(self._shown(name), since, present=present)

    def _shown(self, name: str) -> str:
        return f"{self.place} .{name}"

    def _is_in(self, found: object, name: str) -> bool:
        return _has(found, name)


class Words(Fields):
    """Names in the code of a function, of which torch exports nothing that could be imported.

    They are of parameters, variables, nested functions or metadata.
    """

    def _shown(self, name: str) -> str:
        return f"{self.place} '{name}'"

    def _is_in(self, found: object, name: str) -> bool:
        plain = inspect.unwrap(getattr(found, "__func__", found))  # type: ignore[arg-type]
        return isinstance(plain, FunctionType) and name in _words_of(plain.__code__)


class Shape(Fields):
    """A class or module of torch that is used as a protocol says, and in no other way."""

    def __init__(
        self,
        place: str,
        protocol: type,
        *,
        added: Mapping[str, Release] | None = None,
        feature: str = "",
    ) -> None:
        names: list[str] = []
        for base in reversed(protocol.__mro__):
            if base.__module__ == protocol.__module__:
                names += inspect.get_annotations(base)
                names += (
                    name
                    for name, member in vars(base).items()
                    if isinstance(member, (FunctionType, classmethod, property))
                    and not name.startswith("__")
                )
        super().__init__(place, " ".join(names), added=added or {}, feature=feature)


def declarations() -> tuple[Declaration, ...]:
    """Return everything that was declared, in that order."""
    return tuple(_declarations)


def bind_declarations() -> None:
    """Bind all declarations: what a torch lacks shows now, and not during a compile.

    Raises:
        UnsupportedTorchError: the installed torch lacks a required name that it should have.
    """
    for declaration in _declarations:
        try:
            declaration.bind()
        except UnsupportedTorchError:
            if not declaration.feature:
                raise


def require(feature: str) -> None:
    """Bind the names that a feature needs.

    Raises:
        UnsupportedTorchError: the installed torch lacks one of them.
    """
    for declaration in _declarations:
        if declaration.feature == feature:
            declaration.bind()


def survey() -> list[Row]:
    """Return a row for every name that was declared. Imports torch's compiler."""
    return [row for declaration in _declarations for row in declaration.rows()]


def check_names() -> None:
    """Check every name that the cache requires, also those that objects and functions have.

    Raises:
        UnsupportedTorchError: the installed torch lacks one of them.
    """
    lacking = [row for row in survey() if row.expected and not row.present and not row.feature]
    if lacking:
        names = ", ".join(row.name for row in lacking)
        raise UnsupportedTorchError(f"torch {installed_version()} lacks {names}")


def _releases(since: Release) -> str:
    return "all" if since == _ALWAYS else "{}.{}-".format(*since)


def _locate(place: str) -> tuple[object, str]:
    """Return the owner of the name at ``place``, and the last component of it.

    Raises:
        UnsupportedTorchError: the installed torch has no such name.
    """
    module, _, path = place.partition(":")
    try:
        owner: object = import_module(module)
        if not path:
            package, _, name = module.rpartition(".")
            return import_module(package), name
        *outer, name = path.split(".")
        for step in outer:
            owner = getattr(owner, step)
        getattr(owner, name)
    except (ImportError, AttributeError) as exc:
        raise UnsupportedTorchError(f"torch {installed_version()} lacks {place}") from exc
    return owner, name


def _find(place: str) -> object:
    try:
        return getattr(*_locate(place))
    except UnsupportedTorchError:
        return _ABSENT


def _has(place: object, name: str) -> bool:
    """Return whether a module has ``name``, or objects of a class as far as its methods say."""
    if hasattr(place, name):
        return True
    bases = place.__mro__ if isinstance(place, type) else ()
    return any(
        name in inspect.get_annotations(base)
        or any(name in method.__code__.co_names for method in _functions(base))
        for base in bases
    )


def _functions(owner: type) -> Iterator[FunctionType]:
    for member in vars(owner).values():
        for accessor in (member.fget, member.fset) if isinstance(member, property) else (member,):
            found = inspect.unwrap(accessor) if callable(accessor) else accessor
            if isinstance(found, FunctionType):
                yield found


def _words_of(code: CodeType) -> set[str]:
    """Return names and short texts in ``code``, and in the code of functions nested in it."""
    words = {code.co_name, *code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            words |= _words_of(constant)
        for word in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(word, str):
                words.add(word)
    return words
