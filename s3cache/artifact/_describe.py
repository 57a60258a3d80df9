"""From torch's objects to their descriptions, from there to the header of an entry, and back.

What is described of an object is not listed: each of its attributes is, in the field of that name
where its type is the one that the field has, else in ``extra``. Nothing is rebuilt from this:
torch's own objects are in the entry.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeVar, cast, get_args, get_origin

import msgpack  # type: ignore[import-untyped]

from s3cache.artifact._artifact import CONDITIONS
from s3cache.artifact._metadata import (
    AOTConfig,
    Backward,
    GraphDescription,
    Meta,
    OpaqueMeta,
    PlainTensorMeta,
    Source,
    SubclassCreationMeta,
    SubclassMeta,
    TorchName,
    TypeName,
    ViewAndMutationMeta,
    ViewMeta,
)
from s3cache.artifact._values import (
    Value,
    from_plain,
    hints_of,
    is_short,
    is_union,
    is_value,
    name_of_type,
    to_plain,
    value_of,
)
from s3cache.errors import CorruptError
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.frame import Header
    from s3cache.torch_api.protocols import AOTResult

__all__ = ["describe", "described", "description", "packed", "unpacked"]

M = TypeVar("M", bound=Meta)

# Fifty times what a GPT of 6 layers takes.
_MAX_PACKED_BYTES = 256 << 10
_MAX_BYTES = 64 << 20
# See MAX_ITEMS of the frame: no graph has that many inputs.
_MAX_ITEMS = 1 << 16


def describe(entry: AOTResult) -> GraphDescription:
    """All that torch's result for one graph says of it, but for its code."""
    parts = {name: getattr(entry, name, None) for name in internals.ENTRY_DESCRIPTION.names}
    subclasses, config = parts.pop("maybe_subclass_meta"), parts.pop("sanitized_aot_config")
    bulk = {*internals.ENTRY_BULK.names, *internals.ENTRY_DESCRIPTION.names, CONDITIONS}
    extra = {name: value_of(part) for name, part in _attributes(entry).items() if name not in bulk}
    half = entry.compiled_bw
    return GraphDescription(
        runtime_metadata=described(ViewAndMutationMeta, entry.runtime_metadata),
        aot_config=None if config is None else described(AOTConfig, config),
        maybe_subclass_meta=None if subclasses is None else described(SubclassMeta, subclasses),
        num_fw_outs_saved_for_bw=cast("int | None", parts["num_fw_outs_saved_for_bw"]),
        indices_of_inps_to_detach=tuple(
            cast("list[int]", parts["indices_of_inps_to_detach"] or ())
        ),
        dispatch_wrappers=tuple(value_of(wrapper) for wrapper in entry.dispatch_wrappers),
        backward=None if half is None else _backward(half),
        has_backward_module=entry.serialized_bw_module is not None,
        s3cache_conditions=value_of(getattr(entry, CONDITIONS, None)),
        extra=extra,
    )


def description(header: Header) -> GraphDescription | None:
    """What the header of an entry says of its graph; ``None`` if it says nothing.

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


# -- as bytes


def packed(description: GraphDescription) -> bytes | None:
    """What goes into a header: zlib over msgpack; ``None`` if that is too large for one.

    Equal descriptions give equal bytes, different ones different bytes.
    """
    content = zlib.compress(msgpack.packb(to_plain(description), use_bin_type=True))
    return content if len(content) <= _MAX_PACKED_BYTES else None


def unpacked(content: bytes) -> GraphDescription:
    """The description that :func:`packed` made into ``content``.

    Raises:
        CorruptError: it has not.
    """
    try:
        inflating = zlib.decompressobj()
        plain = inflating.decompress(content, _MAX_BYTES)
        if not inflating.eof or inflating.unused_data:
            raise CorruptError("runtime", "is too large, cut short, or followed by something")
        limits = dict.fromkeys(("max_array_len", "max_map_len"), _MAX_ITEMS)
        return from_plain(
            GraphDescription,
            msgpack.unpackb(plain, raw=False, strict_map_key=True, max_ext_len=0, **limits),
        )
    except (zlib.error, ValueError, TypeError, RecursionError, msgpack.UnpackException) as exc:
        raise CorruptError("runtime", f"is no description ({exc!r})") from None


# -- torch's objects


def described(cls: type[M], theirs: object) -> M:
    """What ``cls`` says of the object of torch that it stands for."""
    hints = hints_of(cls)
    known: dict[str, object] = {}
    extra: dict[str, Value] = {}
    for name, part in {**_attributes(theirs), **_computed(cls, theirs)}.items():
        try:
            if name not in hints or name in ("extra", "kind"):
                raise _UnfitError
            known[name] = _fitted(hints[name], part)
        except _UnfitError:
            extra[name] = value_of(part)
    return cls(**known, extra=extra)


class _UnfitError(Exception):
    """Something is not of the type that is known here."""


def _attributes(theirs: object) -> dict[str, object]:
    names = [field.name for field in fields(theirs)] if is_dataclass(theirs) else []
    known = {name: getattr(theirs, name) for name in names if hasattr(theirs, name)}
    return {**known, **getattr(theirs, "__dict__", {})}


def _computed(cls: type, theirs: object) -> dict[str, object]:
    """Properties of torch's object that are told like attributes."""
    names = internals.COMPUTED if "mutation_type" in hints_of(cls) else ()
    return {name: getattr(theirs, name) for name in names if hasattr(theirs, name)}


def _fitted(hint: object, theirs: object) -> object:
    """``theirs`` as ``hint`` has it, if nothing of it gets lost.

    Raises:
        _UnfitError: it would.
    """
    if is_value(hint):
        return value_of(theirs)
    if is_union(hint):
        return _one_of(get_args(hint), theirs)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal and isinstance(theirs, Enum) and theirs.name in arguments:
        return theirs.name
    if origin is tuple and isinstance(theirs, (list, tuple)):
        return tuple(_fitted(arguments[0], part) for part in theirs)
    if origin is frozenset and isinstance(theirs, (set, frozenset)):
        return frozenset(_fitted(arguments[0], part) for part in theirs)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(theirs, Mapping):
        if all(type(name) is str and is_short(name) for name in theirs):
            return {name: _fitted(arguments[1], part) for name, part in theirs.items()}
        raise _UnfitError
    return _single(hint, theirs)


def _single(hint: object, theirs: object) -> object:
    if hint is TypeName and isinstance(theirs, type):
        return name_of_type(theirs)
    if hint is TorchName and type(theirs).__module__ == "torch":
        return str(theirs)
    if hint is Source:
        return _source(theirs)
    if hint is ViewMeta:
        return _view(theirs)
    if isinstance(hint, type) and issubclass(hint, Meta):
        if type(theirs).__name__ != hint.__name__:
            raise _UnfitError
        return described(hint, theirs)
    if type(theirs) is hint and value_of(theirs) is theirs:
        return theirs
    raise _UnfitError


def _one_of(hints: tuple[object, ...], theirs: object) -> object:
    if theirs is None and type(None) in hints:
        return None
    some = [hint for hint in hints if hint is not type(None)]
    if len(some) > 1:
        some = [_CREATION[name] for name in _CREATION if name == type(theirs).__name__]
    if not some:
        raise _UnfitError
    return _fitted(some[0], theirs)


_CREATION: dict[str, type[Meta]] = {
    cls.__name__: cls for cls in (PlainTensorMeta, SubclassCreationMeta, OpaqueMeta)
}


def _view(view: object) -> ViewMeta:
    as_tuple = getattr(view, "as_tuple", None)  # not every kind of view has it
    if as_tuple is None:
        return ViewMeta(type=type(view).__name__, extra={"view": value_of(view)})
    return ViewMeta(type=type(view).__name__, arguments=value_of(as_tuple()))


def _source(source: object) -> Source:
    name = internals.name_of_source(source)
    if name is not None and not is_short(name):
        name = None  # its description says it
    return Source(name=name, description=value_of(source, records=(internals.source.get(),)))


def _backward(half: object) -> Backward:
    names = [name for name in hints_of(Backward) if hasattr(half, name) and name != "extra"]
    known = {name: _fitted(hints_of(Backward)[name], getattr(half, name)) for name in names}
    return Backward(**known)  # type: ignore[arg-type]
