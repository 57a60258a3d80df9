"""Names of torch's internals, declared: where each is, in which releases, and of what type.

A declaration is bound to the installed torch when it is first used, or when
:func:`bind_declarations` is called; nothing here imports torch before. What it gives is read
each time: if somebody replaces the name in torch, that is seen.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Generic, TypeAlias, TypeVar

from s3cache.errors import UnsupportedTorchError

__all__ = [
    "Behaviour",
    "Declaration",
    "Fields",
    "Internal",
    "Release",
    "Shape",
    "Words",
    "bind_declarations",
    "declarations",
    "installed_release",
    "installed_version",
    "located",
    "require",
]

T = TypeVar("T")

#: Major and minor version: what is declared holds for all patch releases of one.
Release: TypeAlias = tuple[int, int]


@functools.cache
def installed_version() -> str:
    """torch's version, without importing it; ``"(none)"`` without torch."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "(none)"


@functools.cache
def installed_release() -> Release:
    """The release that is installed; (0, 0) where its version is none or not a number."""
    numbers = re.match(r"(\d+)\.(\d+)", installed_version())
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def located(place: str) -> tuple[object, str]:
    """What holds the name at ``place``, and the last part of it.

    Args:
        place: ``"module:path"``, or a module.

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


class Declaration:
    """One or more names at one place of torch, and the releases that have it.

    Args:
        place: ``"module:path"``, or a module.
        since, until: the first and the last release that has it; ``None`` for no end.
        instead: what takes its place in the others.
        feature: the only thing that needs it, and that is off without it. A name without a feature
            is required: there is no cache without it.
    """

    def __init__(
        self,
        place: str,
        *,
        since: Release | None = None,
        until: Release | None = None,
        instead: str = "",
        feature: str = "",
    ) -> None:
        self.place = place
        self.since = since
        self.until = until
        self.instead = instead
        self.feature = feature
        _declarations.append(self)

    @property
    def expected(self) -> bool:
        """Whether the installed release has it, by this declaration."""
        return self.holds_for(installed_release())

    def holds_for(self, release: Release) -> bool:
        """Whether ``release`` has it, by this declaration."""
        return not (
            (self.since is not None and release < self.since)
            or (self.until is not None and release > self.until)
        )

    @property
    def releases(self) -> str:
        """The releases that have it, for people."""
        first = "" if self.since is None else "{}.{}".format(*self.since)
        last = "" if self.until is None else "{}.{}".format(*self.until)
        return f"{first}-{last}" if first or last else "all"

    def bind(self) -> None:
        """Find it in the installed torch.

        Raises:
            UnsupportedTorchError: it is expected there, and is not.
        """


_declarations: list[Declaration] = []


def declarations() -> tuple[Declaration, ...]:
    """Everything that was declared, in that order."""
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


class Internal(Declaration, Generic[T]):
    """A function, class, module, constant or option of torch.

    Args:
        moved: other places of it, and the first release that has it there.

    Attributes:
        get: what it is now. Raises :class:`UnsupportedTorchError` where this torch lacks it.
        find: the same, but ``None`` in a release that is declared not to have it.
    """

    get: Callable[[], T]
    find: Callable[[], T | None]

    def __init__(
        self,
        place: str,
        *,
        since: Release | None = None,
        until: Release | None = None,
        instead: str = "",
        feature: str = "",
        moved: Mapping[Release, str] | None = None,
    ) -> None:
        for release, other in sorted((moved or {}).items()):
            if installed_release() >= release:
                place = other
        super().__init__(place, since=since, until=until, instead=instead, feature=feature)
        self.get, self.find = self._bind_and_get, self._bind_and_find

    def owner(self) -> tuple[object, str]:
        """What to set which attribute of, in order to replace it.

        Raises:
            UnsupportedTorchError: this torch lacks it.
        """
        if not self.expected:
            instead = f"; instead: {self.instead}" if self.instead else ""
            raise UnsupportedTorchError(
                f"{self.place} is of torch {self.releases}, not of {installed_version()}{instead}"
            )
        return located(self.place)

    def bind(self) -> None:
        """See :meth:`Declaration.bind`. From then on to get it is one ``getattr``."""
        self.get, self.find = self._bind_and_get, self._bind_and_find
        if self.expected:
            self.get = self.find = functools.partial(getattr, *self.owner())
        else:
            self.find = type(None)  # which returns None when it is called

    def _bind_and_get(self) -> T:
        self.owner()  # raises where this torch has none
        self.bind()
        return self.get()

    def _bind_and_find(self) -> T | None:
        self.bind()
        return self.find()


class Fields(Declaration):
    """Attributes or options that are read, by name, off what a place of torch stands for.

    Args:
        place: a class, for attributes of its objects, or a module.
        names: of the attributes, separated by space.
        added: those that not every release has, and the first that has them.

    Attributes:
        names: all of them.
        present: those that the installed release has.
    """

    def __init__(
        self,
        place: str,
        names: str,
        *,
        added: Mapping[str, Release] | None = None,
        feature: str = "",
    ) -> None:
        super().__init__(place, feature=feature)
        self.names = tuple(names.split())
        self.added = dict(added or {})

    @functools.cached_property
    def present(self) -> frozenset[str]:
        release = installed_release()
        return frozenset(name for name in self.names if release >= self.added.get(name, release))

    def bind(self) -> None:
        """See :meth:`Declaration.bind`. Objects come later, so that nothing is raised."""
        _ = self.present


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
        super().__init__(place, " ".join(_members(protocol)), added=added, feature=feature)


def _members(protocol: type) -> list[str]:
    """What a protocol asks for, that of its bases first."""
    members: list[str] = []
    for base in reversed(protocol.__mro__):
        if base.__module__ == protocol.__module__:
            members += inspect.get_annotations(base)
            methods = (name for name, member in vars(base).items() if _is_method(member))
            members += (name for name in methods if not name.startswith("__"))
    return members


def _is_method(member: object) -> bool:
    return isinstance(member, (FunctionType, classmethod, property))


class Behaviour(Declaration):
    """Something that a name does, and that can be tried.

    Args:
        what: what it does.
        holds: whether it does that.
    """

    def __init__(self, place: str, what: str, holds: Callable[[], bool]) -> None:
        super().__init__(place)
        self.what = what
        self.holds = holds


class Words(Declaration):
    """Names that a function of torch gives to parameters, variables, metadata, nested functions.

    s3cache relies on them, and torch has nothing that could be imported by them. To iterate gives
    the names.

    Args:
        place: the function.
        words: the names, separated by space.
    """

    def __init__(
        self,
        place: str,
        words: str,
        *,
        since: Release | None = None,
        until: Release | None = None,
        instead: str = "",
        feature: str = "",
    ) -> None:
        super().__init__(place, since=since, until=until, instead=instead, feature=feature)
        self.words = tuple(words.split())

    def __iter__(self) -> Iterator[str]:
        return iter(self.words)
