"""The classes of ``_metadata`` as plain data and back: what msgpack holds.

A dataclass is a map of those of its fields that are not ``None``. Whoever reads it keeps what it
does not know in ``extra``: a newer s3cache, or a newer torch, may say more.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from s3cache.artifact import _metadata
from s3cache.artifact._values import Thing, Value
from s3cache.errors import CorruptError

__all__ = ["from_plain", "hints_of", "is_union", "is_value", "to_plain"]

M = TypeVar("M")


_hints: dict[type, dict[str, object]] = {}


def hints_of(cls: type) -> dict[str, object]:
    """Types of the fields of a class of ``_metadata``, by name."""
    if cls not in _hints:
        _hints[cls] = get_type_hints(cls, vars(_metadata))
    return _hints[cls]


def is_union(hint: object) -> bool:
    """Whether one of several types is meant, of which ``None`` may be one."""
    return get_origin(hint) in (Union, types.UnionType)


def is_value(hint: object) -> bool:
    """Whether any :data:`Value` is meant."""
    return is_union(hint) and Thing in get_args(hint)


# -- there


def to_plain(value: object) -> object:
    """A described object, or part of one, as maps, arrays and scalars."""
    if is_dataclass(value):
        named = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {
            name: to_plain(part)
            for name, part in named
            if part is not None and not (name == "extra" and not part)
        }
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [to_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {name: to_plain(part) for name, part in value.items()}
    return value


# -- and back


def from_plain(cls: type[M], plain: object) -> M:
    """The object of ``cls`` that was written as ``plain``.

    Raises:
        CorruptError: it cannot have been written so by any release.
    """
    return _object(cls, _map(plain, cls.__name__))


def _object(cls: type[M], plain: Mapping[str, object]) -> M:
    hints = hints_of(cls)
    known: dict[str, object] = {}
    extra: dict[str, Value] = {}
    for name, part in plain.items():
        if name == "extra":
            extra.update({key: _value(member) for key, member in _map(part, name).items()})
        elif name in hints:
            known[name] = _read(hints[name], part, name)
        else:
            extra[name] = _value(part)
    return cls(**known, extra=extra)  # type: ignore[call-arg]


def _read(hint: object, plain: object, where: str) -> object:
    """``plain`` as something of the type that ``hint`` says."""
    if is_value(hint):
        return _value(plain)
    if is_union(hint):
        return _one_of(get_args(hint), plain, where)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal and plain in arguments:
        return plain
    if origin is tuple:
        return tuple(_read(arguments[0], part, where) for part in _array(plain, where))
    if origin is frozenset:
        return frozenset(_read(arguments[0], part, where) for part in _array(plain, where))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: _read(arguments[1], part, name) for name, part in _map(plain, where).items()}
    if isinstance(hint, type) and is_dataclass(hint):
        return _object(hint, _map(plain, where))
    if type(plain) is getattr(hint, "__supertype__", hint):  # of NewType
        return plain
    raise CorruptError("runtime", f"its {where} is {type(plain).__name__}")


def _one_of(hints: tuple[object, ...], plain: object, where: str) -> object:
    if plain is None and type(None) in hints:
        return None
    some = [hint for hint in hints if hint is not type(None)]
    if len(some) > 1:  # several classes, told apart by ``kind``
        kind = _map(plain, where).get("kind")
        some = [hint for hint in some if kind in get_args(hints_of(cast("type", hint))["kind"])]
    if not some:
        raise CorruptError("runtime", f"its {where} is of no known kind")
    return _read(some[0], plain, where)


def _value(plain: object) -> Value:
    if isinstance(plain, list):
        return tuple(_value(part) for part in plain)
    if not isinstance(plain, dict):
        return cast("Value", plain)
    text, digest, items, parts = (plain.get(name) for name in ("text", "digest", "items", "fields"))
    if set(plain) - {"type", "text", "digest", "items", "fields"} or "type" not in plain:
        return Thing("", fields={name: _value(part) for name, part in plain.items()})
    return Thing(
        str(plain["type"]),
        None if text is None else str(text),
        None if digest is None else str(digest),
        None if items is None else tuple(map(_value, _array(items, "items"))),
        None if parts is None else {k: _value(v) for k, v in _map(parts, "fields").items()},
    )


def _map(plain: object, where: str) -> Mapping[str, object]:
    if not isinstance(plain, dict):
        raise CorruptError("runtime", f"its {where} is no map")
    return plain


def _array(plain: object, where: str) -> list[object]:
    if not isinstance(plain, list):
        raise CorruptError("runtime", f"its {where} is no array")
    return plain
