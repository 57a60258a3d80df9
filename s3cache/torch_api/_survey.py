"""What was declared of torch's internals, against the torch that is installed."""

from __future__ import annotations

import dataclasses
import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from s3cache.errors import UnsupportedTorchError
from s3cache.torch_api._declare import (
    Behaviour,
    Declaration,
    Fields,
    Words,
    declarations,
    installed_release,
    installed_version,
    located,
)

__all__ = ["Row", "check_names", "survey"]

_ABSENT = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One name.

    Attributes:
        name: where it is.
        releases: those that are declared to have it.
        expected: whether the installed one is among them.
        present: whether the installed one has it.
        instead: what takes its place where it is not expected.
        feature: what needs it, if the rest of s3cache does not.
    """

    name: str
    releases: str
    expected: bool
    present: bool
    instead: str = ""
    feature: str = ""


def check_names() -> None:
    """Check every name that the cache requires, also those that objects and functions have.

    Raises:
        UnsupportedTorchError: the installed torch lacks one of them.
    """
    lacking = [row for row in survey() if row.expected and not row.present and not row.feature]
    if lacking:
        names = ", ".join(row.name for row in lacking)
        raise UnsupportedTorchError(f"torch {installed_version()} lacks {names}")


def survey() -> list[Row]:
    """Return a row for every name that was declared. Imports torch's compiler."""
    return [
        dataclasses.replace(row, feature=declaration.feature)
        for declaration in declarations()
        for row in _rows(declaration)
    ]


def _rows(declaration: Declaration) -> Iterator[Row]:
    place = _found(declaration.place)
    releases, instead = declaration.releases, declaration.instead
    if isinstance(declaration, Fields):
        for name in declaration.names:
            since = declaration.added.get(name)
            yield Row(
                f"{declaration.place} .{name}",
                "all" if since is None else "{}.{}-".format(*since),
                since is None or installed_release() >= since,
                place is not _ABSENT and _has(place, name),
            )
    elif isinstance(declaration, Words):
        mentioned = set(_mentioned(place))
        for word in declaration.words:
            name = f"{declaration.place} '{word}'"
            yield Row(name, releases, declaration.expected, word in mentioned, instead)
    elif isinstance(declaration, Behaviour):
        name = f"{declaration.place} {declaration.what}"
        yield Row(name, releases, declaration.expected, declaration.holds(), instead)
    else:
        present = place is not _ABSENT
        yield Row(declaration.place, releases, declaration.expected, present, instead)


def _found(place: str) -> object:
    try:
        owner, name = located(place)
    except UnsupportedTorchError:
        return _ABSENT
    return getattr(owner, name)


def _has(place: object, name: str) -> bool:
    """Whether a module has ``name``, or whether objects of a class do as far as its code tells."""
    if hasattr(place, name):
        return True
    bases = place.__mro__ if isinstance(place, type) else ()
    return any(
        name in inspect.get_annotations(base)
        or any(name in _set_by(method.__code__) for method in _functions(base))
        for base in bases
    )


def _functions(owner: type) -> Iterator[FunctionType]:
    for member in vars(owner).values():
        for part in (member.fget, member.fset) if isinstance(member, property) else (member,):
            function = inspect.unwrap(part) if callable(part) else part
            if isinstance(function, FunctionType):
                yield function


def _set_by(code: CodeType) -> set[str]:
    """Attributes that the code sets, of itself or of anything else."""
    instructions = dis.get_instructions(code)
    return {
        str(instruction.argval)
        for instruction in instructions
        if instruction.opname == "STORE_ATTR"
    }


def _mentioned(function: object) -> Iterator[str]:
    """Names and short texts in the code of a function."""
    plain = inspect.unwrap(getattr(function, "__func__", function))  # type: ignore[arg-type]
    if isinstance(plain, FunctionType):
        yield from _words_of(plain.__code__)


def _words_of(code: CodeType) -> Iterator[str]:
    yield code.co_name
    yield from (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _words_of(constant)
        for word in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(word, str):
                yield word
