"""Any value as data that can be read without what made it, and as what msgpack holds.

A :data:`Value` is None, a bool, int, float, short text or bytes, a tuple of values, or a
:class:`Thing`, which stands for everything else. Values that differ have descriptions that differ:
what is not taken apart here is there as a digest.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import (
    TYPE_CHECKING,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from s3cache.errors import CorruptError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Thing",
    "Value",
    "from_plain",
    "hints_of",
    "is_short",
    "is_union",
    "is_value",
    "name_of_type",
    "to_plain",
    "value_of",
]

M = TypeVar("M")

_MAX_DEPTH = 32
_MAX_TEXT = 4000
_MAX_CALLED = 200  # what people would call an object
# Objects that one value is taken apart into; what is beyond is digests. Shared parts count anew.
_MAX_THINGS = 5000
# Their text says all there is to say of them.
_SAID_BY_TEXT = {"torch.device", "torch.dtype", "torch.layout", "torch.memory_format"}


@dataclass(frozen=True)
class Thing:
    """An object that is no plain value: what it is, and as much of it as data can say.

    Attributes:
        type: its class, as ``module.name``.
        text: what people would call it: the name of a member of an enum or of a function, a
            device, the beginning of a long text; ``None`` where items or fields say it.
        digest: of its pickled form, or of all of a long text, where the rest does not tell it from
            every other.
        items: of a sequence or set; of a mapping its pairs.
        fields: attributes of an object, by name.
    """

    type: str
    text: str | None = None
    digest: str | None = None
    items: tuple[Value, ...] | None = None
    fields: Mapping[str, Value] | None = None


#: Union, since it contains itself.
Value: TypeAlias = Union[bool, int, float, str, bytes, tuple["Value", ...], Thing, None]  # noqa: UP007


def value_of(value: object, *, records: tuple[type, ...] = ()) -> Value:
    """``value`` as data. It is never changed, and nothing of it is called but to pickle it.

    Args:
        records: dataclasses that are nothing but their fields, however they pickle.
    """
    return _Describer(records).value(value, 0)


def name_of_type(cls: type) -> str:
    """``module.name`` of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_short(text: str) -> bool:
    """Whether ``text`` is described by itself."""
    return len(text) <= _MAX_TEXT and _is_unicode(text)


class _Describer:
    def __init__(self, records: tuple[type, ...]) -> None:
        self._records = records
        self._left = _MAX_THINGS

    def value(self, value: object, depth: int) -> Value:
        if value is None or isinstance(value, bool) or type(value) is float:
            return value
        if type(value) is int and -(1 << 63) <= value < 1 << 63:
            return value
        if (type(value) is str and is_short(value)) or (
            type(value) is bytes and len(value) <= _MAX_TEXT
        ):
            return value
        if type(value) is tuple and depth < _MAX_DEPTH:
            return tuple(self.value(item, depth + 1) for item in value)
        self._left -= 1
        if depth >= _MAX_DEPTH or self._left < 0:
            return _opaque(value)
        return self._thing(value, depth + 1)

    def _thing(self, value: object, depth: int) -> Thing:
        kind = name_of_type(type(value))
        if isinstance(value, type):
            return Thing("builtins.type", text=name_of_type(value))
        if isinstance(value, Enum):
            return Thing(kind, text=value.name)
        if kind in _SAID_BY_TEXT:
            return Thing(kind, text=str(value))
        if isinstance(value, (list, tuple)):
            return Thing(kind, items=tuple(self.value(item, depth) for item in value))
        if isinstance(value, (set, frozenset)):
            items = sorted((self.value(item, depth) for item in value), key=repr)
            return Thing(kind, items=tuple(items))
        if isinstance(value, Mapping):
            pairs = ((self.value(k, depth), self.value(v, depth)) for k, v in value.items())
            return Thing(kind, items=tuple(pairs))
        tensor = self._tensor(value, depth)
        if tensor is not None:
            return tensor
        if isinstance(value, self._records):
            parts = _fields(value)
        elif _is_its_attributes(value):
            parts = {**_fields(value), **getattr(value, "__dict__", {})}
        else:
            return _opaque(value)
        return Thing(kind, fields={name: self.value(part, depth) for name, part in parts.items()})

    def _tensor(self, value: object, depth: int) -> Thing | None:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return None
        tensor: Tensor = value
        known: dict[str, Value] = {}
        for name in ("shape", "stride", "dtype", "device", "requires_grad"):
            try:
                part: object = tensor.stride() if name == "stride" else getattr(tensor, name)
                known[name] = self.value(part, depth)
            except Exception:  # noqa: BLE001 - whatever a subclass makes of it
                known[name] = None
        return Thing(name_of_type(type(tensor)), digest=_pickled(tensor), fields=known)


def _fields(value: object) -> dict[str, object]:
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _is_its_attributes(value: object) -> bool:
    """Whether an object is nothing but its attributes: it has no way of its own to pickle."""
    cls = type(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType, ModuleType)) or (
        cls.__reduce_ex__ is not object.__reduce_ex__
        or cls.__reduce__ is not object.__reduce__
        or getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)
    ):
        return False
    slots = any(vars(base).get("__slots__") for base in cls.__mro__)
    return is_dataclass(value) if slots else hasattr(value, "__dict__")


def _opaque(value: object) -> Thing:
    kind = name_of_type(type(value))
    if type(value) is str:
        content = value.encode(errors="surrogatepass")
        return Thing(kind, value[:_MAX_CALLED].encode(errors="replace").decode(), _digest(content))
    if type(value) is bytes:
        return Thing(kind, digest=_digest(value))
    name = getattr(value, "__qualname__", None)
    text = f"{getattr(value, '__module__', '')}.{name}" if isinstance(name, str) else _text(value)
    digest = _pickled(value) or _digest(_text(value).encode(errors="surrogatepass"))
    return Thing(kind, text[:_MAX_CALLED].encode(errors="replace").decode(), digest)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - whatever a user's class does
        return ""


def _pickled(value: object) -> str | None:
    try:
        return _digest(pickle.dumps(value))
    except Exception:  # noqa: BLE001 - many things cannot be pickled, each with its own error
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _is_unicode(text: str) -> bool:
    return text.isascii() or text.encode(errors="replace").decode() == text


# -- as what msgpack holds, and back


_hints: dict[type, dict[str, object]] = {}


def hints_of(cls: type) -> dict[str, object]:
    """Types of the fields of a class of ``_metadata``, by name."""
    if cls not in _hints:
        _hints[cls] = get_type_hints(cls)
    return _hints[cls]


def is_union(hint: object) -> bool:
    """Whether one of several types is meant, of which ``None`` may be one."""
    return get_origin(hint) in (Union, types.UnionType)


def is_value(hint: object) -> bool:
    """Whether any :data:`Value` is meant."""
    return is_union(hint) and Thing in get_args(hint)


def to_plain(value: object) -> object:
    """Return a described object, or part of one, as maps, arrays and scalars.

    A dataclass is a map of those of its fields that are not ``None``.
    """
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


def from_plain(cls: type[M], plain: object) -> M:
    """Return the object of ``cls`` that was written as ``plain``.

    What it does not know goes to ``extra``: a newer s3cache, or a newer torch, may say more.

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
            extra.update({key: _value_from(member) for key, member in _map(part, name).items()})
        elif name in hints:
            known[name] = _read(hints[name], part, name)
        else:
            extra[name] = _value_from(part)
    return cls(**known, extra=extra)  # type: ignore[call-arg]


def _read(hint: object, plain: object, where: str) -> object:
    """``plain`` as something of the type that ``hint`` says."""
    if is_value(hint):
        return _value_from(plain)
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
    if len(some) > 1:  # several classes; ``kind`` says which
        kind = _map(plain, where).get("kind")
        some = [hint for hint in some if kind in get_args(hints_of(cast("type", hint))["kind"])]
    if not some:
        raise CorruptError("runtime", f"its {where} is of no known kind")
    return _read(some[0], plain, where)


def _value_from(plain: object) -> Value:
    if isinstance(plain, list):
        return tuple(_value_from(part) for part in plain)
    if not isinstance(plain, dict):
        return cast("Value", plain)
    text, digest, items, parts = (plain.get(name) for name in ("text", "digest", "items", "fields"))
    if set(plain) - {"type", "text", "digest", "items", "fields"} or "type" not in plain:
        return Thing("", fields={name: _value_from(part) for name, part in plain.items()})
    return Thing(
        str(plain["type"]),
        None if text is None else str(text),
        None if digest is None else str(digest),
        None if items is None else tuple(map(_value_from, _array(items, "items"))),
        None if parts is None else {k: _value_from(v) for k, v in _map(parts, "fields").items()},
    )


def _map(plain: object, where: str) -> Mapping[str, object]:
    if not isinstance(plain, dict):
        raise CorruptError("runtime", f"its {where} is no map")
    return plain


def _array(plain: object, where: str) -> list[object]:
    if not isinstance(plain, list):
        raise CorruptError("runtime", f"its {where} is no array")
    return plain
