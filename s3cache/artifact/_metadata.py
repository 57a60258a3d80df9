"""What a compiled graph does to its inputs and outputs, as typed data.

Each dataclass here stands for one of AOTAutograd's (``torch/_functorch/_aot_autograd/schemas.py``)
and has its names of class and fields; torch's docstrings say what a field means. They are read from
the header of an entry: torch need not be installed, and nothing is unpickled.

Every field may be ``None``, or empty: torch has no such field, or the entry was written before it
was described, or ``extra`` has it. ``extra`` holds, by name, each attribute of torch's object that
is not a field here, or not of the field's type: what a newer torch adds is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, Union

# -- any value as data


class TypeName(str):
    """A class, as ``module.name``."""

    __slots__ = ()


class TorchName(str):
    """A device, dtype, layout or memory format as torch writes it: ``"cuda:0"``."""

    __slots__ = ()


class MemberName(str):
    """A member of an enumeration."""

    __slots__ = ()


@dataclass(frozen=True)
class Thing:
    """An object that is no plain value: its class, and as much of it as data can say.

    Attributes:
        type: its class, as ``module.name``.
        text: what people would call it: the name of a function, the beginning of a long text;
            ``None`` where items or fields say it.
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


@dataclass(frozen=True, kw_only=True)
class Meta:
    """Base of the classes that stand for torch's; ``extra`` holds the attributes they lack."""

    extra: Mapping[str, Value] = field(default_factory=dict)


#: None, a bool, number, short text or bytes; a tuple, set or mapping of values; a described object,
#: or a :class:`Thing` for any other. Values that differ have descriptions that differ, but for
#: whether a sequence is a list or a tuple: what is not taken apart has a digest.
Value: TypeAlias = Union[  # noqa: UP007 - it contains itself
    bool,
    int,
    float,
    str,
    bytes,
    tuple["Value", ...],
    frozenset["Value"],
    Mapping[str, "Value"],
    Meta,
    Thing,
    None,
]


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
    raw_type: TypeName | None = None
    base_idx: int | None = None
    dynamic_dims: frozenset[int] | None = None
    requires_grad: bool | None = None
    requires_grad_for_backward: bool | None = None
    view_meta_sequence: ViewMetaSequence | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryFormatMeta(Meta):
    """The layout that a tangent is expected to have: sizes and strides, or a memory format."""

    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    memory_format: TorchName | None = None


@dataclass(frozen=True, kw_only=True)
class PlainTensorMeta(Meta):
    """A tensor that is no subclass: which of the inner graph's it is."""

    kind: Literal["plain"] = "plain"
    unwrapped_idx: int | None = None
    memory_format: MemoryFormatMeta | None = None
    size_symbol_placeholders: tuple[bool, ...] | None = None
    stride_symbol_placeholders: tuple[bool, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class OpaqueMeta(Meta):
    """An object that is no tensor inside of a subclass."""

    kind: Literal["opaque"] = "opaque"


@dataclass(frozen=True, kw_only=True)
class SubclassCreationMeta(Meta):
    """A tensor subclass, and how to make it of the inner graph's tensors.

    ``attrs`` are what it wraps: subclasses may wrap subclasses. Symbolic sizes are ``None``.
    """

    kind: Literal["subclass"] = "subclass"
    flat_tensor_start_idx: int | None = None
    arg_count: int | None = None
    included_subclass_symints: bool | None = None
    attrs: Mapping[str, PlainTensorMeta | SubclassCreationMeta | OpaqueMeta] = field(
        default_factory=dict
    )
    outer_size: tuple[int | None, ...] | None = None
    outer_stride: tuple[int | None, ...] | None = None
    outer_size_from_attr: str | None = None
    outer_stride_from_attr: str | None = None
    meta: Value = None
    original_subclass: Value = None
    original_subclass_type: TypeName | None = None
    memory_format: MemoryFormatMeta | None = None


_Creation: TypeAlias = PlainTensorMeta | SubclassCreationMeta | OpaqueMeta


@dataclass(frozen=True, kw_only=True)
class ViewAndMutationMeta(Meta):
    """All that is known of a graph's aliases and mutations.

    Those below the first blank line are computed by torch from those above it.
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
    graphsafe_rng_device: TorchName | None = None
    mutated_inp_stream_indices: tuple[int | None, ...] | None = None
    compile_id_str: str | None = None
    tangent_source_stack_traces: tuple[Value, ...] | None = None
    is_rng_op_functionalized: bool | None = None
    num_outputs_rng_offset: int | None = None
    dynamic_saved_tensors_idxs: Value = None

    mutated_inp_runtime_indices: tuple[int, ...] | None = None
    num_mutated_inp_runtime_indices: int | None = None
    mutated_graph_handled_indices: tuple[int, ...] | None = None
    num_mutated_graph_handled_indices: int | None = None
    mutated_graph_handled_indices_seen_by_autograd: tuple[int, ...] | None = None
    num_mutated_graph_handled_indices_seen_by_autograd: int | None = None
    aliased_out_indices: tuple[int, ...] | None = None
    unsafe_view_out_indices: tuple[int, ...] | None = None
    num_outputs: int | None = None
    num_outputs_non_aliased: int | None = None
    num_outputs_aliased_to_inputs: int | None = None
    num_outputs_aliased_to_intermediates: int | None = None
    num_outputs_aliased: int | None = None
    num_unsafe_view_outputs: int | None = None
    dynamic_outputs: bool | None = None
    output_types: tuple[TypeName, ...] | None = None
    num_forward_returns: int | None = None
    num_forward: int | None = None


@dataclass(frozen=True, kw_only=True)
class SubclassMeta(Meta):
    """Of a graph with subclasses: the same of its inner graph, and what its gradients are."""

    fw_metadata: ViewAndMutationMeta | None = None
    grad_input_metas: tuple[_Creation, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Source(Meta):
    """Where Dynamo got an input from: as Python would write it, and as torch's object does."""

    name: str | None = None
    description: Value = None


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
