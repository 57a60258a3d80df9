"""Compare a description with torch's own object, without the code that made the description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

_SAID_BY_TEXT = ("device", "dtype", "layout", "memory_format")
_RANDOM = "precompile_backend_id"  # an id that each compile ahead of time draws: left out


def differences_from_torch(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """Yield each attribute in which a description differs from the object of torch."""
    kind = type(theirs)
    if not isinstance(ours, dict) or ours.get("class") != f"{kind.__module__}.{kind.__qualname__}":
        yield f"{where}: {ours!r} for {theirs!r}"
    elif "arguments" in ours:
        yield from _differences(ours["arguments"], theirs.as_tuple(), f"{where}.arguments")
    elif "text" not in ours:
        own = getattr(theirs, "__dict__", {})
        known = {name: value for name, value in own.items() if value is not None}
        for name in {*ours, *known} - {"class", _RANDOM}:
            value = known[name] if name in known else getattr(theirs, name)
            yield from _differences(ours.get(name), value, f"{where}.{name}")


def _differences(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    kind = type(theirs)
    found = ours.get("text") if isinstance(ours, dict) and "text" in ours else ours
    if isinstance(theirs, type):
        expected: Any = f"{theirs.__module__}.{theirs.__qualname__}"
    elif isinstance(theirs, Enum):
        expected = theirs.name
    elif kind.__name__ in _SAID_BY_TEXT or (kind is int and theirs.bit_length() > 63):
        expected = str(theirs)
    elif theirs is None or isinstance(theirs, (bool, int, float, str, bytes)):
        expected = theirs
    elif isinstance(theirs, (set, frozenset)):
        found, expected = set(ours), {*theirs}
    elif isinstance(theirs, (list, tuple)):
        found, expected = len(ours), len(theirs)
        for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
            yield from _differences(our, their, f"{where}[{index}]")
    elif isinstance(theirs, Mapping):
        found, expected = [*ours], [*map(str, theirs)]
        for key, value in theirs.items():
            yield from _differences(ours.get(str(key)), value, f"{where}[{key!r}]")
    else:
        yield from differences_from_torch(ours, theirs, where)
        return
    if not (type(found) is type(expected) and found == expected):
        yield f"{where}: {ours!r} for {theirs!r}"
