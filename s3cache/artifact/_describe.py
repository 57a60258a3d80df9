"""What a compiled graph does to its inputs and outputs, as plain data.

It is in the header of an entry, to be read without torch and without unpickling anything. Names are
those of AOTAutograd's schemas, and stay as they are here when torch renames one. Nothing is rebuilt
from this: torch's own objects are in the entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from s3cache.torch_api import Fields, internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import AOTResult, OutputInfo

__all__ = ["describe"]

_MAX_DEPTH = 10
_MAX_TEXT = 200


def describe(entry: AOTResult) -> dict[str, object]:
    """The runtime metadata of torch's result for one graph.

    Every name is there, whatever the torch version; ``None`` if that torch has no such thing.
    """
    metadata = entry.runtime_metadata
    return {
        "inputs": [_fields(info, internals.INPUT_INFO) for info in metadata.input_info],
        "outputs": [_output(info) for info in metadata.output_info],
        "subclasses": {
            "inputs": _subclasses(metadata.subclass_inp_meta),
            "outputs": _subclasses(metadata.subclass_fw_graph_out_meta),
            "tangents": _subclasses(metadata.subclass_tangent_meta),
        },
        **_fields(metadata, internals.RUNTIME_METADATA),
        "num_tokens": len(metadata.tokens or ()),
        "wrappers": [type(wrapper).__name__ for wrapper in entry.dispatch_wrappers],
        "has_backward": entry.compiled_bw is not None,
        "has_backward_module": entry.serialized_bw_module is not None,
    }


def _fields(value: object, fields: Fields) -> dict[str, object]:
    return {name: _plain(field) for name, field in internals.read_fields(fields, value).items()}


def _output(info: OutputInfo) -> dict[str, object]:
    views = info.view_meta_sequence
    return {
        **_fields(info, internals.OUTPUT_INFO),
        "view_meta_sequence": [_view(view) for view in (views.sequence if views else ())],
    }


def _view(view: object) -> dict[str, object]:
    as_tuple = getattr(view, "as_tuple", None)  # not every kind of view has it
    return {
        "type": type(view).__name__,
        "arguments": _plain(as_tuple()) if as_tuple is not None else None,
    }


def _subclasses(metas: Iterable[object] | None) -> list[dict[str, object]]:
    return [_subclass(meta) for meta in metas or ()]


def _subclass(meta: object) -> dict[str, object]:
    """A plain tensor's place among the inner graph's, or a subclass and what it wraps."""
    if not isinstance(meta, internals.subclass_meta.get()):
        # An opaque object has no place.
        return {"type": "plain", "unwrapped_idx": getattr(meta, "unwrapped_idx", None)}
    return {
        "type": _plain(meta.original_subclass_type or type(meta.original_subclass)),
        "flat_tensor_start_idx": meta.flat_tensor_start_idx,
        "arg_count": meta.arg_count,
        "attrs": {name: _subclass(inner) for name, inner in meta.attrs.items()},
        "outer_size": _plain(meta.outer_size),
        "outer_stride": _plain(meta.outer_stride),
    }


def _plain(value: object, depth: int = 0) -> object:
    """``value`` as msgpack has it; text for what it has not."""
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, Enum):
        return value.name
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if depth < _MAX_DEPTH:
        if isinstance(value, (set, frozenset)):
            return sorted((_plain(member, depth + 1) for member in value), key=repr)
        if isinstance(value, Mapping):
            return {str(name): _plain(member, depth + 1) for name, member in value.items()}
        if isinstance(value, Iterable):
            return [_plain(member, depth + 1) for member in value]
    return str(value)[:_MAX_TEXT]
