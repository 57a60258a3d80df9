"""Any value as data that can be read without what made it.

A :data:`Value` is None, a bool, int, float, short text or bytes, a tuple of values, or a
:class:`Thing`, which stands for everything else. Values that differ have descriptions that differ:
what is not taken apart here is there as a digest.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Thing", "Value", "is_short", "name_of_type", "value_of"]

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
