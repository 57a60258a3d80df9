"""From torch's objects to their descriptions, by field name; as bytes in a header, and back.

No field is listed here: each attribute of torch's object is described, in the field of that name if
it is of the field's type, else in ``extra``. Two entries with different metadata never describe
alike, but for whether a sequence is a list or a tuple. Nothing is rebuilt from a description:
torch's own objects are in the entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import sys
import types
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import (
    TYPE_CHECKING,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack  # type: ignore[import-untyped]

from s3cache.artifact._artifact import CONDITIONS
from s3cache.artifact._metadata import (
    AOTConfig,
    Backward,
    GraphDescription,
    InputAliasInfo,
    MemberName,
    Meta,
    Source,
    SubclassMeta,
    Thing,
    TorchName,
    TypeName,
    Value,
    ViewMeta,
)
from s3cache.errors import CorruptError
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor

    from s3cache.frame import Header
    from s3cache.torch_api.protocols import AOTResult

__all__ = ["describe", "described", "description", "packed", "to_plain", "unpacked"]

M = TypeVar("M", bound=Meta)

# Fifty times what a GPT of 6 layers takes.
_MAX_PACKED_BYTES = 256 << 10
_MAX_BYTES = 64 << 20
# See MAX_ITEMS of the frame: no graph has that many inputs.
_MAX_ITEMS = 1 << 16
_MAX_DEPTH = 32
_MAX_TEXT = 4000
_MAX_SHOWN_TEXT = 200
# Objects that one value is taken apart into; the rest are digests. Shared ones count each time.
_MAX_THINGS = 20_000
# Their text says all there is to say of them.
_SAID_BY_TEXT = ("device", "dtype", "layout", "memory_format")
_SCHEMAS = "torch._functorch._aot_autograd."
_CLASSES: dict[str, type[Meta]] = {cls.__name__: cls for cls in Meta.__subclasses__()}
_NAMES = {cls.__name__: cls for cls in (TypeName, TorchName, MemberName)}


# -- as bytes


def description(header: Header) -> GraphDescription | None:
    """Return what the header of an entry says of its graph; ``None`` if it says nothing.

    Neither torch nor the entry's sections are needed, and nothing is unpickled.

    Raises:
        CorruptError: it is no description.
    """
    runtime = header.meta.get("runtime")
    if runtime is None:
        return None
    if not isinstance(runtime, bytes):
        raise CorruptError("runtime", f"is {type(runtime).__name__}")
    return unpacked(runtime)


def packed(description: GraphDescription) -> bytes | None:
    """Return what goes into a header, zlib over msgpack; ``None`` if that is too large for one.

    Equal descriptions give equal bytes, different ones different bytes.
    """
    content = zlib.compress(msgpack.packb(_to_wire(description), use_bin_type=True))
    return content if len(content) <= _MAX_PACKED_BYTES else None


def unpacked(content: bytes) -> GraphDescription:
    """Return the description that :func:`packed` made into ``content``.

    What does not fit is in ``extra``: a newer s3cache, or a newer torch, may say more.

    Raises:
        CorruptError: it is no description.
    """
    try:
        inflating = zlib.decompressobj()
        plain = inflating.decompress(content, _MAX_BYTES)
        if not inflating.eof or inflating.unused_data:
            raise CorruptError("runtime", "is too large, cut short, or followed by something")
        limits = dict.fromkeys(("max_array_len", "max_map_len"), _MAX_ITEMS)
        found = _from_wire(
            msgpack.unpackb(plain, raw=False, strict_map_key=True, max_ext_len=0, **limits)
        )
    except (
        *(zlib.error, msgpack.UnpackException, RecursionError),
        *(AttributeError, KeyError, TypeError, ValueError),  # not as _to_wire() writes it
    ) as exc:
        raise CorruptError("runtime", f"is no description ({exc!r})") from None
    if not isinstance(found, GraphDescription):
        raise CorruptError("runtime", f"describes {type(found).__name__}")
    return found


def _to_wire(value: Value) -> object:
    """Return what msgpack holds: whatever is no scalar or tuple is a map with its ``type``."""
    if isinstance(value, tuple):
        return list(map(_to_wire, value))
    if type(value) in _NAMES.values():
        return {"type": type(value).__name__, "text": str(value)}
    if isinstance(value, frozenset):
        return {"type": "set", "items": list(map(_to_wire, _in_order(value)))}
    if isinstance(value, Mapping):
        return {"type": "map", "fields": _fields_to_wire(value)}
    if isinstance(value, Meta):
        said = {name: attr for name, attr in vars(value).items() if attr is not None}
        named = {name: attr for name, attr in said.items() if name not in ("extra", "kind")}
        return {
            "type": type(value).__name__,
            "fields": _fields_to_wire({**named, **value.extra}),
        }
    if isinstance(value, Thing):
        items, attrs = value.items, value.fields
        return {
            **vars(value),
            "items": None if items is None else list(map(_to_wire, items)),
            "fields": None if attrs is None else _fields_to_wire(attrs),
        }
    return value


def _fields_to_wire(attrs: Mapping[str, Value]) -> dict[str, object]:
    return {name: _to_wire(attr) for name, attr in attrs.items()}


def _from_wire(plain: object) -> Value:
    """Return what :func:`_to_wire` made into ``plain``."""
    if isinstance(plain, list):
        return tuple(map(_from_wire, plain))
    if not isinstance(plain, dict):
        return cast("Value", plain)
    kind, text, digest = str(plain["type"]), plain.get("text"), plain.get("digest")
    items, attrs = plain.get("items"), plain.get("fields")
    read_items = None if items is None else tuple(map(_from_wire, items))
    read = None if attrs is None else {name: _from_wire(attr) for name, attr in attrs.items()}
    if kind in _CLASSES:
        return _typed(_CLASSES[kind], read or {})
    if kind in _NAMES:
        return _NAMES[kind](text)
    if kind == "set":
        return frozenset(read_items or ())
    if kind == "map":
        return read or {}
    return Thing(kind, text, digest, read_items, read)


def to_plain(value: object) -> object:
    """Return a described object, or a value in one, as maps, arrays and scalars, for JSON.

    A dataclass is a map of those of its fields that are not ``None``.
    """
    if is_dataclass(value):
        named = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {
            name: to_plain(attr)
            for name, attr in named
            if attr is not None and not (name == "extra" and not attr)
        }
    if isinstance(value, (tuple, frozenset)):
        return list(map(to_plain, value if isinstance(value, tuple) else _in_order(value)))
    if isinstance(value, Mapping):
        return {name: to_plain(attr) for name, attr in value.items()}
    return value


def _in_order(values: Iterable[Value]) -> list[Value]:
    return sorted(values, key=lambda each: f"{each:020}" if type(each) is int else repr(each))


# -- by field name


def _typed(cls: type[M], attrs: Mapping[str, Value]) -> M:
    """Return the object of ``cls`` with these fields; ``extra`` has what does not fit."""
    hints: dict[str, object] = get_type_hints(cls)
    known: dict[str, Value] = {}
    extra: dict[str, Value] = {}
    for name, attr in attrs.items():
        is_known = name in hints and name not in ("extra", "kind") and _fits(hints[name], attr)
        (known if is_known else extra)[name] = attr
    return cls(**known, extra=extra)


def _fits(hint: object, value: Value) -> bool:
    """Return whether ``value`` is of the type that a field has."""
    origin: object = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        return Thing in arguments or any(_fits(each, value) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (tuple, frozenset):
        is_one = isinstance(value, (tuple, frozenset)) and isinstance(value, cast("type", origin))
        return is_one and all(_fits(arguments[0], item) for item in cast("Iterable[Value]", value))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(arguments[1], v) for v in value.values())
    if not isinstance(hint, type):
        return False
    return isinstance(value, hint) and isinstance(value, bool) is (hint is bool)


# -- from torch's objects


def describe(entry: AOTResult) -> GraphDescription:
    """Return all that torch's result for one graph says of it, but for its code."""
    bulk = {*internals.ENTRY_BULK.names, CONDITIONS}
    attrs = {name: attr for name, attr in _attributes(entry).items() if name not in bulk}
    subclasses = attrs.pop("maybe_subclass_meta", None)
    config = attrs.pop("sanitized_aot_config", None)
    backward = entry.compiled_bw
    names = [name for name in Backward.__dataclass_fields__ if hasattr(backward, name)]
    attrs |= {
        "runtime_metadata": entry.runtime_metadata,
        "indices_of_inps_to_detach": attrs.get("indices_of_inps_to_detach") or (),
        "dispatch_wrappers": list(entry.dispatch_wrappers),
        "has_backward_module": entry.serialized_bw_module is not None,
        CONDITIONS: getattr(entry, CONDITIONS, None),
    }
    return replace(
        _described(GraphDescription, attrs),
        aot_config=None if config is None else described(AOTConfig, config),
        maybe_subclass_meta=None if subclasses is None else described(SubclassMeta, subclasses),
        backward=None
        if backward is None
        else _described(Backward, {name: getattr(backward, name) for name in names}),
    )


def described(cls: type[M], theirs: object) -> M:
    """Return what ``cls`` says of the object of torch that it stands for."""
    return _described(cls, _attributes(theirs))


def _described(cls: type[M], attrs: Mapping[str, object]) -> M:
    return _typed(cls, {name: _Describer().value(attr, 0) for name, attr in attrs.items()})


class _Describer:
    """Turns one value into data; nothing of it is called but to pickle it."""

    def __init__(self) -> None:
        self._left = _MAX_THINGS

    def value(self, value: object, depth: int) -> Value:
        kind = type(value)
        if value is None or kind in (bool, float) or _is_short(value):
            return cast("Value", value)
        if isinstance(value, int) and kind is int and -(1 << 63) <= value < 1 << 63:
            return value
        if isinstance(value, type):
            return TypeName(_name_of_type(value))
        if isinstance(value, Enum):
            return MemberName(value.name)
        if kind.__module__ == "torch" and kind.__name__ in _SAID_BY_TEXT:
            return TorchName(value)
        if depth >= _MAX_DEPTH:
            return _opaque(value)
        depth += 1
        if kind.__name__ in _CLASSES and kind.__module__.startswith(_SCHEMAS):
            return _typed(_CLASSES[kind.__name__], self._values(_attributes(value), depth))
        if kind.__name__.endswith("ViewMeta"):
            as_tuple = getattr(value, "as_tuple", None)  # not every kind of view has it
            if as_tuple is None:
                return ViewMeta(type=kind.__name__, extra={"view": _opaque(value)})
            return ViewMeta(type=kind.__name__, arguments=self.value(as_tuple(), depth))
        if isinstance(value, (list, tuple)) and kind.__name__ in ("list", "tuple", "Size"):
            return tuple(self.value(item, depth) for item in value)
        if isinstance(value, dict) and kind in (dict, OrderedDict) and all(map(_is_name, value)):
            return self._values(value, depth)
        if isinstance(value, (set, frozenset)) and kind in (set, frozenset):
            members = [self.value(item, depth) for item in value]
            with contextlib.suppress(TypeError):  # of a described object that has mappings
                return frozenset(members)
        self._left -= 1
        return _opaque(value) if self._left < 0 else self._thing(value, depth)

    def _values(self, attrs: Mapping[str, object], depth: int) -> dict[str, Value]:
        return {name: self.value(attr, depth) for name, attr in attrs.items()}

    def _thing(self, value: object, depth: int) -> Value:
        kind = _name_of_type(type(value))
        if isinstance(value, internals.source.get()):
            name = internals.name_of_source(value)
            said = Thing(kind, fields=self._values(_fields_of(value), depth))
            return Source(name=name if _is_short(name) else None, description=said)
        if isinstance(value, (list, tuple)):
            return Thing(kind, items=tuple(self.value(item, depth) for item in value))
        if isinstance(value, (set, frozenset)):
            items = (self.value(item, depth) for item in value)
            return Thing(kind, items=tuple(sorted(items, key=repr)))
        if isinstance(value, Mapping):
            pairs = ((self.value(k, depth), self.value(v, depth)) for k, v in value.items())
            return Thing(kind, items=tuple(pairs))
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(value, depth)
        if _is_its_attributes(value):
            return Thing(kind, fields=self._values(_attributes(value), depth))
        return _opaque(value)

    def _tensor(self, tensor: Tensor, depth: int) -> Thing:
        known: dict[str, Value] = {}
        for name in ("shape", "stride", "dtype", "device", "requires_grad"):
            try:
                attr: object = tensor.stride() if name == "stride" else getattr(tensor, name)
                known[name] = self.value(attr, depth)
            except Exception:  # noqa: BLE001 - whatever a subclass makes of it
                known[name] = None
        return Thing(_name_of_type(type(tensor)), digest=_pickled(tensor), fields=known)


def _attributes(theirs: object) -> dict[str, object]:
    computed = internals.COMPUTED if type(theirs).__name__ == InputAliasInfo.__name__ else ()
    return {
        **_fields_of(theirs),
        **getattr(theirs, "__dict__", {}),
        **{name: getattr(theirs, name) for name in computed if hasattr(theirs, name)},
    }


def _fields_of(theirs: object) -> dict[str, object]:
    names = [field.name for field in fields(theirs)] if is_dataclass(theirs) else []
    return {name: getattr(theirs, name) for name in names if hasattr(theirs, name)}


def _name_of_type(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_short(text: object) -> bool:
    """Return whether text or bytes are described by themselves."""
    if type(text) is bytes:
        return len(text) <= _MAX_TEXT
    return type(text) is str and len(text) <= _MAX_TEXT and _printable(text) == text


def _is_name(key: object) -> bool:
    return type(key) is str and _is_short(key)


def _is_its_attributes(value: object) -> bool:
    """Return whether an object is only its attributes: it has no way of its own to pickle."""
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
    kind = _name_of_type(type(value))
    if type(value) is bytes:
        return Thing(kind, digest=_digest(value))
    text = _text(value)
    digest = None if type(value) is str else _pickled(value)
    digest = digest or _digest(text.encode(errors="surrogatepass"))
    name = getattr(value, "__qualname__", None)
    shown = f"{getattr(value, '__module__', '')}.{name}" if isinstance(name, str) else text
    return Thing(kind, _printable(shown[:_MAX_SHOWN_TEXT]), digest)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - whatever a user's class does
        return ""


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _pickled(value: object) -> str | None:
    try:
        return _digest(pickle.dumps(value))
    except Exception:  # noqa: BLE001 - many things cannot be pickled, each with its own error
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
