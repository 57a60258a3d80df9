"""What a compiled graph does to its inputs and outputs, as typed data.

Each dataclass here stands for one of AOTAutograd's (``torch/_functorch/_aot_autograd/schemas.py``)
and has its names of class and fields; torch's docstrings say what a field means. Attributes are
copied by name when an entry is saved, and read without torch. Nothing is rebuilt from them.

Any field may be ``None``, or empty, if torch has no such field. ``extra`` holds, by name, each
attribute that is no field here, or not of the field's type: what a newer torch adds is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import (
    Literal,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack  # type: ignore[import-untyped]

from s3cache.artifact._artifact import CLASS, described_as, packed_plain
from s3cache.errors import CorruptError
from s3cache.frame import Header

__all__ = [
    "AOTConfig",
    "Backward",
    "GraphDescription",
    "InputAliasInfo",
    "MemoryFormatMeta",
    "MutationType",
    "OpaqueMeta",
    "OutputAliasInfo",
    "OutputType",
    "PlainTensorMeta",
    "Source",
    "SubclassCreationMeta",
    "SubclassMeta",
    "Thing",
    "Value",
    "ViewAndMutationMeta",
    "ViewMeta",
    "ViewMetaSequence",
    "description",
    "packed",
    "to_plain",
]

_MAX_BYTES = 64 << 20
# See MAX_ITEMS of the frame: no graph has that many inputs.
_MAX_ITEMS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Meta:
    """A described object; ``extra`` holds the attributes that its class has no field for."""

    extra: Mapping[str, Value] = field(default_factory=dict)


#: What any attribute is described as. Sets are tuples, in order; classes, members of enumerations,
#: devices, dtypes, layouts and memory formats are text.
Value: TypeAlias = Union[  # noqa: UP007 - it contains itself
    bool, int, float, str, bytes, tuple["Value", ...], Mapping[str, "Value"], Meta, None
]


@dataclass(frozen=True, kw_only=True)
class Thing(Meta):
    """Any other object.

    Attributes:
        type: its class, as ``module.name``.
        text: the beginning of its ``str()``, if it has no fields.
        fields: attributes of a tensor, or of an object of torch's, by name.
    """

    type: str = ""
    text: str | None = None
    fields: Mapping[str, Value] | None = None


# -- torch's metadata

#: What an output is to the inputs, to other outputs and to intermediates of the graph.
OutputType: TypeAlias = Literal[
    "non_alias",
    "alias_of_input",
    "is_input",
    "alias_of_intermediate_save_as_output",
    "alias_of_intermediate",
    "alias_of_intermediate_base_is_user_output",
    "unsafe_view_alias",
    "custom_function_view",
]
#: Whether an input is mutated, and whether the compiled code does so or the code around it.
MutationType: TypeAlias = Literal["NOT_MUTATED", "MUTATED_IN_GRAPH", "MUTATED_OUT_GRAPH"]


@dataclass(frozen=True, kw_only=True)
class InputAliasInfo(Meta):
    """What happens to one input."""

    is_leaf: bool | None = None
    mutates_data: bool | None = None
    mutates_metadata: bool | None = None
    mutations_hidden_from_autograd: bool | None = None
    mutations_under_no_grad_or_inference_mode: bool | None = None
    mutation_inductor_storage_resize: bool | None = None
    mutates_storage_metadata: bool | None = None
    mutation_is_shallow_copy_data: bool | None = None
    requires_grad: bool | None = None
    keep_input_mutations: bool | None = None
    mutation_type: MutationType | None = None


@dataclass(frozen=True, kw_only=True)
class ViewMeta(Meta):
    """One view; ``arguments`` are those to replay it with, ``None`` where that kind hides them."""

    type: str | None = None
    arguments: Value = None


@dataclass(frozen=True, kw_only=True)
class ViewMetaSequence(Meta):
    """The views that lead from a base to an output, and what the last one looks like."""

    sequence: tuple[ViewMeta, ...] = ()
    metadata: Value = None


@dataclass(frozen=True, kw_only=True)
class OutputAliasInfo(Meta):
    """What one output is; ``base_idx`` counts inputs, outputs or bases, as ``output_type`` says."""

    output_type: OutputType | None = None
    raw_type: str | None = None
    base_idx: int | None = None
    dynamic_dims: tuple[int, ...] | None = None
    requires_grad: bool | None = None
    requires_grad_for_backward: bool | None = None
    view_meta_sequence: ViewMetaSequence | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryFormatMeta(Meta):
    """The layout that a tangent is expected to have: sizes and strides, or a memory format."""

    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    memory_format: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlainTensorMeta(Meta):
    """A tensor that is no subclass: which of the inner graph's it is."""

    unwrapped_idx: int | None = None
    memory_format: MemoryFormatMeta | None = None
    size_symbol_placeholders: tuple[bool, ...] | None = None
    stride_symbol_placeholders: tuple[bool, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class OpaqueMeta(Meta):
    """An object that is no tensor inside of a subclass."""


_Creation: TypeAlias = Union[PlainTensorMeta, "SubclassCreationMeta", OpaqueMeta]


@dataclass(frozen=True, kw_only=True)
class SubclassCreationMeta(Meta):
    """A tensor subclass, and how to make it of the inner graph's tensors.

    ``attrs`` are what it wraps: subclasses may wrap subclasses. Symbolic sizes are ``None``.
    """

    flat_tensor_start_idx: int | None = None
    arg_count: int | None = None
    included_subclass_symints: bool | None = None
    attrs: Mapping[str, _Creation] = field(default_factory=dict)
    outer_size: tuple[int | None, ...] | None = None
    outer_stride: tuple[int | None, ...] | None = None
    outer_size_from_attr: str | None = None
    outer_stride_from_attr: str | None = None
    meta: Value = None
    original_subclass: Value = None
    original_subclass_type: str | None = None
    memory_format: MemoryFormatMeta | None = None


@dataclass(frozen=True, kw_only=True)
class ViewAndMutationMeta(Meta):
    """All that is known of a graph's aliases and mutations.

    ``extra`` has what torch computes of these, such as indices of the outputs of each kind.
    """

    input_info: tuple[InputAliasInfo, ...] = ()
    output_info: tuple[OutputAliasInfo, ...] = ()
    num_intermediate_bases: int | None = None
    keep_input_mutations: bool | None = None
    traced_tangents: tuple[Value, ...] = ()
    traced_tangents_descs: tuple[Value, ...] = ()
    subclass_inp_meta: tuple[_Creation, ...] = ()
    subclass_fw_graph_out_meta: tuple[_Creation, ...] = ()
    subclass_tangent_meta: tuple[_Creation, ...] = ()
    traced_tangent_metas: tuple[Value, ...] | None = None
    num_symints_saved_for_bw: int | None = None
    num_tensors_saved_with_no_vc_check: int | None = None
    saved_tensor_is_graph_input: tuple[bool, ...] | None = None
    num_opaque_objects_saved_for_bw: int | None = None
    is_train: bool | None = None
    grad_enabled_mutation: bool | None = None
    deterministic: bool | None = None
    static_input_indices: tuple[int, ...] = ()
    act_input_indices: tuple[int, ...] = ()
    act_input_paths: tuple[Value, ...] | None = None
    tokens: Value = None
    indices_of_inputs_that_requires_grad_with_mutations_in_bw: tuple[int, ...] = ()
    bw_donated_idxs: tuple[int, ...] | None = None
    num_backward_tokens: int | None = None
    num_graphsafe_rng_states: int | None = None
    graphsafe_rng_state_index: int | None = None
    graphsafe_rng_device: str | None = None
    mutated_inp_stream_indices: tuple[int | None, ...] | None = None
    compile_id_str: str | None = None
    tangent_source_stack_traces: tuple[Value, ...] | None = None
    is_rng_op_functionalized: bool | None = None
    num_outputs_rng_offset: int | None = None
    dynamic_saved_tensors_idxs: Value = None


@dataclass(frozen=True, kw_only=True)
class SubclassMeta(Meta):
    """Of a graph with subclasses: the same of its inner graph, and what its gradients are."""

    fw_metadata: ViewAndMutationMeta | None = None
    grad_input_metas: tuple[_Creation, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Source(Meta):
    """Where Dynamo got an input from: as Python would write it, and as torch's object does."""

    name: str | None = None
    description: str | None = None


@dataclass(frozen=True, kw_only=True)
class AOTConfig(Meta):
    """How AOTAutograd went about the graph: what of its configuration an entry keeps.

    torch 2.11 and 2.12 keep all of it, less functions: ``extra`` has what is not here.
    """

    num_params_buffers: int | None = None
    aot_id: int | None = None
    keep_inference_input_mutations: bool | None = None
    is_export: bool | None = None
    no_tangents: bool | None = None
    dynamic_shapes: bool | None = None
    aot_autograd_arg_pos_to_source: tuple[Source | None, ...] | None = None
    static_input_indices: tuple[int, ...] | None = None
    enable_log: bool | None = None
    pre_dispatch: bool | None = None
    precompile_backend_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Backward(Meta):
    """What the backward of an entry needs beside its code."""

    backward_state_indices: tuple[int, ...] | None = None
    num_symints_saved_for_bw_: int | None = None


@dataclass(frozen=True, kw_only=True)
class GraphDescription(Meta):
    """What the entry of one compiled graph says of it.

    Attributes:
        runtime_metadata: aliases and mutations.
        aot_config: how it was traced.
        maybe_subclass_meta: the same of the inner graph, where subclasses were unwrapped.
        num_fw_outs_saved_for_bw: results of the forward that only the backward takes.
        indices_of_inps_to_detach: inputs that are detached before the code runs.
        dispatch_wrappers: what is done around the compiled code, outermost last: for each one its
            class and what it was made with.
        backward: ``None`` for a graph without one.
        has_backward_module: whether it holds what compiled autograd traces.
        s3cache_conditions: what the code relies on beside its key, see ``hooks/_conditions.py``.
    """

    runtime_metadata: ViewAndMutationMeta = field(default_factory=ViewAndMutationMeta)
    aot_config: AOTConfig | None = None
    maybe_subclass_meta: SubclassMeta | None = None
    num_fw_outs_saved_for_bw: int | None = None
    indices_of_inps_to_detach: tuple[int, ...] | None = None
    dispatch_wrappers: tuple[Value, ...] = ()
    backward: Backward | None = None
    has_backward_module: bool | None = None
    s3cache_conditions: Value = None

    @property
    def input_names(self) -> tuple[str, ...]:
        """What each input is called in the program, or ``"input 3"`` where that is not known."""
        sources = (self.aot_config and self.aot_config.aot_autograd_arg_pos_to_source) or ()
        names = dict(enumerate(source and source.name for source in sources))
        count = len(self.runtime_metadata.input_info)
        return tuple(names.get(index) or f"input {index}" for index in range(count))


_CLASSES: dict[str, type[Meta]] = {cls.__name__: cls for cls in Meta.__subclasses__()}
_CLASSES["CacheableAOTConfig"] = AOTConfig


def packed(description: GraphDescription) -> bytes | None:
    """Return what goes into a header, zlib over msgpack; ``None`` if that is too large for one."""
    return packed_plain(to_plain(description))


def to_plain(value: Value) -> object:
    """Return a described object, or a value in one, as maps, arrays and scalars.

    An object is a map of its class, and of those of its fields that are not ``None``.
    """
    if isinstance(value, tuple):
        return list(map(to_plain, value))
    if isinstance(value, Meta):
        attrs = {**vars(value), "extra": None, **value.extra}
        return described_as(type(value).__name__, {name: to_plain(a) for name, a in attrs.items()})
    if isinstance(value, Mapping):
        return {name: to_plain(attr) for name, attr in value.items()}
    return value


def description(header: Header) -> GraphDescription | None:
    """Return what the header of an entry says of its graph; ``None`` if it says nothing.

    Neither torch nor the entry's sections are needed, and nothing is unpickled. What does not fit
    is in ``extra``: a newer s3cache, or a newer torch, may say more.

    Raises:
        CorruptError: it is no description.
    """
    content = header.meta.get("runtime")
    if content is None:
        return None
    try:
        inflating = zlib.decompressobj()
        plain = inflating.decompress(cast("bytes", content), _MAX_BYTES)
        if not inflating.eof or inflating.unused_data:
            raise ValueError("too large, cut short, or followed by something")
        limits = dict.fromkeys(("max_array_len", "max_map_len"), _MAX_ITEMS)
        found = _from_plain(msgpack.unpackb(plain, max_ext_len=0, **limits))
    except (zlib.error, msgpack.UnpackException, RecursionError, TypeError, ValueError) as exc:
        raise CorruptError("runtime", f"is no description ({exc!r})") from None
    if not isinstance(found, GraphDescription):
        raise CorruptError("runtime", f"describes {type(found).__name__}")
    return found


def _from_plain(plain: object) -> Value:
    if isinstance(plain, list):
        return tuple(map(_from_plain, plain))
    if not isinstance(plain, dict):
        return cast("Value", plain)
    attrs = {name: _from_plain(attr) for name, attr in plain.items()}
    name = attrs.pop(CLASS, None)
    if name is None:
        return attrs
    cls = _CLASSES.get(str(name).rpartition(".")[2])
    if cls is None:
        return Thing(type=str(name), fields=attrs)
    hints: dict[str, object] = get_type_hints(cls)
    del hints["extra"]
    known = {name: attr for name, attr in attrs.items() if _fits(hints.get(name), attr)}
    extra = {name: attr for name, attr in attrs.items() if name not in known}
    return cls(**cast("dict[str, object]", known), extra=extra)


def _fits(hint: object, value: Value) -> bool:
    """Return whether ``value`` is of the type that a field has."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return bytes in arguments or any(_fits(each, value) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(arguments[0], item) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(arguments[1], v) for v in value.values())
    return type(value) is hint
