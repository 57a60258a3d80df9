"""torch's internals by name, typed, with the releases that have them.

``names`` declares each one that s3cache uses, ``registries`` and ``compiling`` have functions for
what a name alone does not say, and ``internals`` has all of these. Here is what a declaration is.
It binds to the installed torch when it is first used, or in :func:`require`; nothing here imports
torch before. Values are read each time, so that a name that is replaced in torch is seen.
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
from s3cache.torch_api.protocols import Function

T = TypeVar("T")

#: Major and minor version: a declaration holds for all patch releases of one.
Release: TypeAlias = tuple[int, int]

#: Everything that was declared, in that order.
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
    """Return the installed release; (0, 0) where its version is none or not a number."""
    numbers = re.match(r"(\d+)\.(\d+)", installed_version())
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


class Row(NamedTuple):
    """One declared name, and whether the installed torch should have it, and has it."""

    name: str
    expected: bool
    present: bool
    feature: str


@dataclass(eq=False)
class Declaration:
    """One or more names at one place of torch, and the first release that has them.

    Attributes:
        place: ``"module:path"``, or a module.
        since: the first release that has it, if the oldest supported one does not.
        feature: the only thing that needs it, and that is off without it. A name without a feature
            is required: there is no cache without it.
    """

    place: str
    _: KW_ONLY
    since: Release = (0, 0)
    feature: str = ""

    def __post_init__(self) -> None:
        declarations.append(self)

    @property
    def expected(self) -> bool:
        """Whether the installed release has it, by this declaration."""
        return installed_release() >= self.since

    def bind(self) -> None:
        """Find it in the installed torch, or raise :class:`UnsupportedTorchError`."""

    def rows(self) -> Iterator[Row]:
        """Yield a row for each name. Imports torch's compiler."""
        raise NotImplementedError


@dataclass(eq=False)
class Internal(Declaration, Generic[T]):
    """A function, class, module, constant or option of torch.

    ``works`` tells whether it does what we use it for, where that can be tried.
    """

    _: KW_ONLY
    works: Callable[[T], bool] = lambda _: True
    _owner: tuple[object, str] | None = field(default=None, init=False)

    def get(self) -> T:
        """Return its value now, or raise :class:`UnsupportedTorchError` where torch lacks it."""
        value: T = getattr(*(self._owner or self.owner()))
        return value

    def find(self) -> T | None:
        """Return the same, but ``None`` in a release that is declared not to have it."""
        return self.get() if self.expected else None

    def owner(self) -> tuple[object, str]:
        """Return what to set which attribute of, in order to replace it.

        Raises:
            UnsupportedTorchError: this torch lacks it.
        """
        if self._owner is None:
            if not self.expected:
                of = "{}.{}".format(*self.since)
                raise UnsupportedTorchError(
                    f"torch {installed_version()} lacks {self.place}, which is of {of}"
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

    Declared are those that would be missed by nothing but a key if torch renamed them.

    Attributes:
        said: the names, separated by space.
        added: those that not every release has, and the first one that does.
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
            found = getattr(*_locate(self.place))
        except UnsupportedTorchError:
            found = None
        words = _words_in(found)
        for name in self:
            present = hasattr(found, name) or name in words
            expected = installed_release() >= self.added.get(name, self.since)
            yield Row(f"{self.place} .{name}", expected, present, self.feature)


def require(feature: str = "") -> None:
    """Bind what ``feature`` needs, or the cache as a whole: what lacks shows now.

    Raises:
        UnsupportedTorchError: the installed torch lacks a name that it should have.
    """
    for declaration in declarations:
        if declaration.feature == feature:
            declaration.bind()


def survey() -> list[Row]:
    """Return a row for every name that was declared. Imports torch's compiler."""
    return [row for declaration in declarations for row in declaration.rows()]


def check_names() -> None:
    """Check every name that the cache requires, also those of attributes.

    Raises:
        UnsupportedTorchError: the installed torch lacks one of them.
    """
    lacking = [row for row in survey() if row.expected and not row.present and not row.feature]
    if lacking:
        names = ", ".join(row.name for row in lacking)
        raise UnsupportedTorchError(f"torch {installed_version()} lacks {names}")


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


def _words_in(found: object) -> frozenset[str]:
    """Return the words in the source of a class and its bases, or of a function."""
    words: set[str] = set()
    part: Any
    for part in found.__mro__ if isinstance(found, type) else (found,):
        with contextlib.suppress(OSError, TypeError):  # built-in ones have no source
            source = inspect.getsource(inspect.unwrap(getattr(part, "__func__", part)))
            words.update(re.findall(r"\w+", source))
    return frozenset(words)
