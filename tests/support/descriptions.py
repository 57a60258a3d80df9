"""Whether a description says what torch's own object says, told without the code that describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from s3cache.artifact import Thing

__all__ = ["attributes", "differences_from_torch"]


def attributes(theirs: Any) -> dict[str, Any]:
    """Everything that an object of torch holds, by name."""
    names = [field.name for field in fields(theirs)] if is_dataclass(theirs) else []
    return {**{name: getattr(theirs, name) for name in names}, **vars(theirs)}


def differences_from_torch(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """Where the description of an object of torch does not say the same, attribute by attribute."""
    for name, value in attributes(theirs).items():
        place = f"{where}.{name}"
        if name in ours.extra:
            if type(theirs).__name__ != "AOTConfig":  # until torch 2.12 all of it is kept
                yield f"{place} is extra"
        elif not hasattr(ours, name):
            yield f"{place} is lost"
        else:
            yield from _differences(getattr(ours, name), value, place)


def _differences(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    if type(theirs) is int and not -(1 << 63) <= theirs < 1 << 63:
        if ours != Thing("builtins.int", str(theirs), getattr(ours, "digest", None)):
            yield f"{where}: {ours!r} for {theirs!r}"
    elif theirs is None or isinstance(theirs, (bool, int, float, str, bytes)):
        if not (type(ours) is type(theirs) and ours == theirs):
            yield f"{where}: {ours!r} for {theirs!r}"
    elif isinstance(theirs, Enum):
        said = ours.text if isinstance(ours, Thing) else ours
        if said != theirs.name:
            yield f"{where}: {ours!r} for {theirs!r}"
    elif isinstance(theirs, type):
        said = ours.text if isinstance(ours, Thing) else ours
        if said != f"{theirs.__module__}.{theirs.__qualname__}":
            yield f"{where}: {ours!r} for {theirs!r}"
    elif isinstance(theirs, (list, tuple)):
        items = ours.items if isinstance(ours, Thing) else ours
        if not isinstance(items, tuple) or len(items) != len(theirs):
            yield f"{where}: {ours!r} for {theirs!r}"
        else:
            for index, (our, their) in enumerate(zip(items, theirs, strict=True)):
                yield from _differences(our, their, f"{where}[{index}]")
    elif isinstance(theirs, (set, frozenset)):
        items = (ours.items or ()) if isinstance(ours, Thing) else ours
        if set(items) != set(theirs):
            yield f"{where}: {ours!r} for {theirs!r}"
    elif isinstance(theirs, Mapping):
        yield from _mappings(ours, theirs, where)
    else:
        yield from _objects(ours, theirs, where)


def _mappings(ours: Any, theirs: Mapping[Any, Any], where: str) -> Iterator[str]:
    pairs: Any = ours.items if isinstance(ours, Thing) else ours.items()
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    yield from _differences(tuple(keys), [*theirs], f"{where} keys")
    yield from _differences(tuple(values), [*theirs.values()], where)


def _objects(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    kind = f"{type(theirs).__module__}.{type(theirs).__qualname__}"
    if isinstance(ours, str):  # a device or a memory format
        if ours != str(theirs) or type(theirs).__module__ != "torch":
            yield f"{where}: {ours!r} for {theirs!r}"
    elif isinstance(ours, Thing):
        if ours.type != kind or (ours.text, ours.fields, ours.digest) == (None, None, None):
            yield f"{where}: {ours!r} for {theirs!r}"
        for name, value in (ours.fields or {}).items():
            if hasattr(theirs, name) and not callable(getattr(theirs, name)):
                yield from _differences(value, getattr(theirs, name), f"{where}.{name}")
    elif type(ours).__name__ == "Source":
        if ours.name != theirs.name or ours.description.type != kind:
            yield f"{where}: {ours!r} for {theirs!r}"
    elif type(ours).__name__ == "ViewMeta":
        if ours.type != type(theirs).__name__:
            yield f"{where}: {ours!r} for {theirs!r}"
        elif hasattr(theirs, "as_tuple"):
            yield from _differences(ours.arguments, theirs.as_tuple(), f"{where}.arguments")
    elif type(ours).__name__ != type(theirs).__name__:
        yield f"{where}: {ours!r} for {theirs!r}"
    else:
        yield from differences_from_torch(ours, theirs, where)
