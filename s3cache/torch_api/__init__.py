"""torch's internals by name, typed, with the releases that have them.

``names`` declares every internal that s3cache uses, ``lookups`` and ``compiling`` have functions
on top of the names, and ``internals`` exports all of these. This module defines declarations. A
declaration binds to the installed torch at its first use, or in :func:`require`; torch is not
imported before. Values are read at every use, so that replacements in torch are seen.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from s3cache.errors import UnsupportedTorchError
from s3cache.seam import features
from s3cache.torch_api.protocols import Function

T = TypeVar("T")

#: Major and minor version: a declaration applies to all patch releases.
Release: TypeAlias = tuple[int, int]

#: All declarations, in order.
declarations: list[Declaration] = []


@functools.cache
def installed_version() -> str:
    """Return torch's version, without importing it; ``"(none)"`` without torch."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "(none)"


@functools.cache
def installed_release() -> Release:
    """Return the installed release; (0, 0) without torch or without a numeric version."""
    numbers = re.match(r"(\d+)\.(\d+)", installed_version())
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


class Row(NamedTuple):
    """A declared name, whether the installed torch should have it, and whether it has it."""

    name: str
    expected: bool
    present: bool
    feature: str


@dataclass(eq=False)
class Declaration:
    """One or more names at one place in torch, and the releases that have them.

    Attributes:
        place: ``"module:path"``, or a module.
        since: the first release that has the names, if the oldest supported one does not.
        until: the first release that lacks them again.
        feature: the only feature that needs them; it is off without them. A name without a feature
            is required by the cache.
    """

    place: str
    _: KW_ONLY
    since: Release = (0, 0)
    until: Release = (99, 0)
    feature: str = ""

    def __post_init__(self) -> None:
        declarations.append(self)

    @property
    def expected(self) -> bool:
        """Whether the installed release should have it, by this declaration."""
        return self.since <= installed_release() < self.until

    def bind(self) -> None:
        """Find it in the installed torch, or raise :class:`UnsupportedTorchError`."""

    def rows(self) -> Iterator[Row]:
        """Yield a row for each name. Imports torch's compiler."""
        raise NotImplementedError


@dataclass(eq=False)
class Internal(Declaration, Generic[T]):
    """A function, class, module, constant or option of torch.

    ``works`` tests whether it does what we need, if that can be tested.
    """

    _: KW_ONLY
    works: Callable[[T], bool] = lambda _: True
    _owner: tuple[object, str] | None = field(default=None, init=False)

    def get(self) -> T:
        """Return its current value, or raise :class:`UnsupportedTorchError` if torch lacks it."""
        value: T = getattr(*(self._owner or self.owner()))
        return value

    def find(self) -> T | None:
        """Return its current value, or ``None`` in a release that is declared not to have it."""
        return self.get() if self.expected else None

    def owner(self) -> tuple[object, str]:
        """Return the owner and the attribute to set in order to replace it, or raise like get."""
        if self._owner is None:
            if not self.expected:
                is_old = installed_release() < self.since
                of = "{}.{}".format(*(self.since if is_old else self.until))
                when = "which is of" if is_old else "which was removed in"
                raise UnsupportedTorchError(
                    f"torch {installed_version()} lacks {self.place}, {when} {of}"
                )
            self._owner = _locate(self.place)
        return self._owner

    def bind(self) -> None:
        self._owner = None
        if self.expected:
            self.owner()

    def rows(self) -> Iterator[Row]:
        try:
            works = self.works(getattr(*_locate(self.place)))
        except UnsupportedTorchError:
            works = False
        yield Row(self.place, self.expected, works, self.feature)


AnyFunction: TypeAlias = Internal[Function[Any]]
AnyClass: TypeAlias = Internal[type[Any]]
AnyObject: TypeAlias = Internal[Any]
Predicate: TypeAlias = Internal[Function[bool]]
Flag: TypeAlias = Internal[bool]


@dataclass(eq=False)
class Fields(Declaration):
    """Attributes of a module or class, or words in the code of a function, that we use by name.

    We declare those that only a key would miss if torch renamed them.

    Attributes:
        said: the names, separated by spaces.
        added: names that not every release has, with the first release that does.
    """

    said: str
    _: KW_ONLY
    added: Mapping[str, Release] = field(default_factory=dict)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.said.split())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def rows(self) -> Iterator[Row]:
        try:
            owner = getattr(*_locate(self.place))
        except UnsupportedTorchError:
            owner = None
        words = _words_in(owner)
        for name in self:
            present = hasattr(owner, name) or name in words
            since = self.added.get(name, self.since)
            expected = since <= installed_release() < self.until
            yield Row(f"{self.place} .{name}", expected, present, self.feature)


def require(feature: str = "") -> None:
    """Bind all names that ``feature``, or the cache, needs: raise an error for missing ones now."""
    for declaration in [*declarations]:
        if declaration.feature == feature:
            declaration.bind()


def survey() -> list[Row]:
    """Return a row for every declared name, those of features too. Imports torch's compiler."""
    for each in features():
        if each.torch:
            import_module(each.torch)
    return [row for declaration in declarations for row in declaration.rows()]


def check_names() -> None:
    """Raise :class:`UnsupportedTorchError` if torch lacks a name that the cache requires.

    Attributes are such names too.
    """
    if lacking := [r.name for r in survey() if r.expected and not r.present and not r.feature]:
        raise UnsupportedTorchError(f"torch {installed_version()} lacks {', '.join(lacking)}")


def _locate(place: str) -> tuple[object, str]:
    """Return the owner and last part of a name, or raise :class:`UnsupportedTorchError`."""
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


def _words_in(value: object) -> frozenset[str]:
    """Return the words in the source of a class and its bases, or of a function."""
    words: set[str] = set()
    part: Any
    for part in value.__mro__ if isinstance(value, type) else (value,):
        with contextlib.suppress(OSError, TypeError):  # built-in functions have no source
            source = inspect.getsource(inspect.unwrap(getattr(part, "__func__", part)))
            words.update(re.findall(r"\w+", source))
    return frozenset(words)
