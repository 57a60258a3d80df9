"""Whether a description says what torch's own object says, told without the code that describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

__all__ = ["differences_from_torch"]

_SAID_BY_TEXT = ("device", "dtype", "layout", "memory_format")


def differences_from_torch(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """Where the description of an object of torch does not say the same, attribute by attribute."""
    for name, value in vars(theirs).items():
        place = f"{where}.{name}"
        if name in ours.extra:  # as AOTConfig until torch 2.12, and what torch computes
            if type(theirs).__name__ not in ("AOTConfig", "ViewAndMutationMeta"):
                yield f"{place} is extra"
        elif not hasattr(ours, name):
            if value is not None:  # what is None is left out where no field has it
                yield f"{place} is lost"
        else:
            yield from _differences(getattr(ours, name), value, place)


def _differences(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    kind = type(theirs)
    said = getattr(ours, "text", ours)
    if isinstance(theirs, type):
        expected: Any = f"{theirs.__module__}.{theirs.__qualname__}"
    elif isinstance(theirs, Enum):
        expected = theirs.name
    elif kind.__name__ in _SAID_BY_TEXT or (kind is int and theirs.bit_length() > 63):
        expected = str(theirs)
    elif theirs is None or isinstance(theirs, (bool, int, float, str, bytes)):
        expected = theirs
    elif isinstance(theirs, (set, frozenset)):
        said, expected = set(ours), {*theirs}
    elif isinstance(theirs, (list, tuple)):
        said, expected = len(ours), len(theirs)
        for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
            yield from _differences(our, their, f"{where}[{index}]")
    elif isinstance(theirs, Mapping):
        said, expected = [*ours], [*map(str, theirs)]
        for key, value in theirs.items():
            yield from _differences(ours.get(str(key)), value, f"{where}[{key!r}]")
    else:
        yield from _objects(ours, theirs, where)
        return
    if not (type(said) is type(expected) and said == expected):
        yield f"{where}: {ours!r} for {theirs!r}"


def _objects(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    kind = type(theirs)
    if type(ours).__name__ == "Thing":
        if ours.type != f"{kind.__module__}.{kind.__qualname__}":
            yield f"{where}: {ours!r} for {theirs!r}"
        for name, value in (ours.fields or {}).items():
            yield from _differences(value, getattr(theirs, name), f"{where}.{name}")
    elif type(ours).__name__ == "Source":
        if ours.name != theirs.name or ours.description != str(theirs):
            yield f"{where}: {ours!r} for {theirs!r}"
    elif type(ours).__name__ == "ViewMeta":
        if ours.type != kind.__name__:
            yield f"{where}: {ours!r} for {theirs!r}"
        elif hasattr(theirs, "as_tuple"):
            yield from _differences(ours.arguments, theirs.as_tuple(), f"{where}.arguments")
    elif type(ours).__name__ != kind.__name__:
        yield f"{where}: {ours!r} for {theirs!r}"
    else:
        yield from differences_from_torch(ours, theirs, where)
