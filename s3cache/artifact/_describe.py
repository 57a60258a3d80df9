"""From torch's result for a graph to its description: every attribute, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, cast

from s3cache.artifact._artifact import CONDITIONS
from s3cache.artifact._metadata import (
    CLASSES,
    AOTConfig,
    Backward,
    GraphDescription,
    InputAliasInfo,
    Source,
    Thing,
    Value,
    ViewMeta,
    typed,
)
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import AOTResult

__all__ = ["describe"]

_MAX_DEPTH = 32
_MAX_TEXT = 4000
# Objects that one attribute is taken apart into; shared ones count each time.
_MAX_THINGS = 20_000
_STANDS_FOR = {**CLASSES, "CacheableAOTConfig": AOTConfig}
_SAID_BY_TEXT = ("device", "dtype", "layout", "memory_format")


def describe(entry: AOTResult) -> GraphDescription:
    """Return all that torch's result for one graph says of it, but for its code."""
    attrs = _attributes(entry)
    for name in internals.ENTRY_BULK:
        attrs.pop(name, None)
    backward = entry.compiled_bw
    attrs |= {
        "runtime_metadata": entry.runtime_metadata,
        "aot_config": attrs.pop("sanitized_aot_config", None),
        "indices_of_inps_to_detach": attrs.get("indices_of_inps_to_detach") or (),
        "dispatch_wrappers": entry.dispatch_wrappers,
        "has_backward_module": entry.serialized_bw_module is not None,
        CONDITIONS: getattr(entry, CONDITIONS, None),
    }
    said = {name: described(attr) for name, attr in attrs.items()}
    if backward is not None:
        names = [name for name in Backward.__dataclass_fields__ if hasattr(backward, name)]
        said["backward"] = typed(
            Backward, {name: described(getattr(backward, name)) for name in names}
        )
    return typed(GraphDescription, said)


def described(value: object) -> Value:
    """Return any value as data."""
    return _Describer().value(value, 0)


class _Describer:
    def __init__(self) -> None:
        self._left = _MAX_THINGS

    def value(self, value: object, depth: int) -> Value:
        kind = type(value)
        self._left -= 1
        if value is None or kind in (bool, float):
            return cast("Value", value)
        if isinstance(value, int) and kind is int and -(1 << 63) <= value < 1 << 63:
            return value
        if isinstance(value, (str, bytes)) and kind in (str, bytes) and len(value) <= _MAX_TEXT:
            return value
        if isinstance(value, type):
            return _name_of(value)
        if isinstance(value, Enum):
            return value.name
        if kind.__module__ == "torch" and kind.__name__ in _SAID_BY_TEXT:
            return str(value)
        if depth > _MAX_DEPTH or self._left < 0:
            return _shown(value)
        depth += 1
        if isinstance(value, (list, tuple)):
            return tuple(self.value(item, depth) for item in value)
        if isinstance(value, (set, frozenset)):
            return tuple(sorted((self.value(item, depth) for item in value), key=repr))
        if isinstance(value, Mapping):
            return {str(key): self.value(attr, depth) for key, attr in value.items()}
        return self._object(value, depth)

    def _object(self, value: object, depth: int) -> Value:
        import torch

        kind = type(value)
        if isinstance(value, internals.source.get()):
            return Source(name=internals.name_of_source(value), description=_shown(value).text)
        if isinstance(value, torch.Tensor):
            names = ("shape", "dtype", "device", "requires_grad")
            tensor = {name: self.value(getattr(value, name), depth) for name in names}
            return Thing(type=_name_of(kind), fields=tensor)
        if kind.__name__.endswith("ViewMeta"):
            as_tuple = getattr(value, "as_tuple", tuple)  # not every kind of view has it
            return ViewMeta(type=kind.__name__, arguments=self.value(as_tuple(), depth))
        if kind.__module__.startswith("torch."):
            attrs = {name: self.value(a, depth) for name, a in _attributes(value).items()}
            if kind.__name__ in _STANDS_FOR:
                return typed(_STANDS_FOR[kind.__name__], attrs)
            if is_dataclass(value):
                return Thing(type=_name_of(kind), fields=attrs)
        return _shown(value)


def _attributes(theirs: object) -> dict[str, object]:
    names = [each.name for each in fields(theirs)] if is_dataclass(theirs) else []
    computed = internals.COMPUTED if type(theirs).__name__ == InputAliasInfo.__name__ else ()
    known = {name: getattr(theirs, name) for name in (*names, *computed) if hasattr(theirs, name)}
    return {**known, **getattr(theirs, "__dict__", {})}


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _shown(value: object) -> Thing:
    name = getattr(value, "__qualname__", None)
    try:
        text = str(value) if name is None else f"{value.__module__}.{name}"
    except Exception:  # noqa: BLE001 - whatever a user's class does
        text = ""
    return Thing(type=_name_of(type(value)), text=text[:_MAX_TEXT])
