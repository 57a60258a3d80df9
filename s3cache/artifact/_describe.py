"""What a compiled graph does to its inputs and outputs, as plain data.

It is in the header of an entry, to be read without torch and without unpickling anything. Names are
those of AOTAutograd's schemas (``torch/_functorch/_aot_autograd/schemas.py``), and stay as they are
here when torch renames one. Nothing is rebuilt from this: torch's own objects are in the entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

__all__ = ["describe"]

_MAX_DEPTH = 10
_MAX_TEXT = 200

_INPUT = (
    "is_leaf",
    "requires_grad",
    "mutates_data",
    "mutates_metadata",
    "mutates_storage_metadata",
    "mutations_hidden_from_autograd",
    "mutations_under_no_grad_or_inference_mode",
    "mutation_inductor_storage_resize",
    "mutation_type",
)
_OUTPUT = ("output_type", "raw_type", "base_idx", "dynamic_dims", "requires_grad")
_WHOLE = (
    "num_intermediate_bases",
    "keep_input_mutations",
    "static_input_indices",
    "num_symints_saved_for_bw",
    "num_tensors_saved_with_no_vc_check",
    "num_opaque_objects_saved_for_bw",
    "bw_donated_idxs",
    "indices_of_inputs_that_requires_grad_with_mutations_in_bw",
    "grad_enabled_mutation",
    "deterministic",
    "num_backward_tokens",
    "num_graphsafe_rng_states",
    "is_rng_op_functionalized",
)


def describe(entry: Any) -> dict[str, Any]:
    """The runtime metadata of torch's result for one graph.

    Every name is there, whatever the torch version; ``None`` if that torch has no such thing.
    """
    metadata = entry.runtime_metadata
    return {
        "inputs": [_fields(each, _INPUT) for each in metadata.input_info],
        "outputs": [_output(each) for each in metadata.output_info],
        "subclasses": {
            "inputs": _subclasses(getattr(metadata, "subclass_inp_meta", None)),
            "outputs": _subclasses(getattr(metadata, "subclass_fw_graph_out_meta", None)),
            "tangents": _subclasses(getattr(metadata, "subclass_tangent_meta", None)),
        },
        **_fields(metadata, _WHOLE),
        "num_tokens": len(getattr(metadata, "tokens", None) or ()),
        "wrappers": [type(each).__name__ for each in entry.dispatch_wrappers],
        "has_backward": entry.compiled_bw is not None,
        "has_backward_module": entry.serialized_bw_module is not None,
    }


def _fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: _plain(getattr(value, name, None)) for name in names}


def _output(info: Any) -> dict[str, Any]:
    views = getattr(info, "view_meta_sequence", None)
    return {
        **_fields(info, _OUTPUT),
        "view_meta_sequence": [_view(each) for each in getattr(views, "sequence", ())],
    }


def _view(view: Any) -> dict[str, Any]:
    as_tuple = getattr(view, "as_tuple", None)
    return {
        "type": type(view).__name__,
        "arguments": _plain(as_tuple()) if as_tuple is not None else None,
    }


def _subclasses(metas: Iterable[Any] | None) -> list[Any]:
    return [_subclass(each) for each in metas or ()]


def _subclass(meta: Any) -> dict[str, Any]:
    """A plain tensor's place among the inner graph's, or a subclass and what it wraps."""
    attrs = getattr(meta, "attrs", None)
    if attrs is None:
        return {"type": "plain", "unwrapped_idx": getattr(meta, "unwrapped_idx", None)}
    return {
        "type": _plain(meta.original_subclass_type or type(meta.original_subclass)),
        "flat_tensor_start_idx": meta.flat_tensor_start_idx,
        "arg_count": meta.arg_count,
        "attrs": {name: _subclass(each) for name, each in attrs.items()},
        "outer_size": _plain(meta.outer_size),
        "outer_stride": _plain(meta.outer_stride),
    }


def _plain(value: Any, depth: int = 0) -> Any:
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
            return sorted((_plain(each, depth + 1) for each in value), key=repr)
        if isinstance(value, Mapping):
            return {str(name): _plain(each, depth + 1) for name, each in value.items()}
        if isinstance(value, Iterable):
            return [_plain(each, depth + 1) for each in value]
    return str(value)[:_MAX_TEXT]
