"""Any runtime metadata that torch could have, and that with any one attribute changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from hypothesis import strategies as st
from torch._C import _functionalization
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd import schemas as torch_schemas
from torch._functorch._aot_autograd.functional_utils import MetadataKey, ViewMetaSequence
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.descriptions import attributes

__all__ = ["changed", "configs", "metadata", "signatures"]

schemas: Any = torch_schemas  # whose arguments differ from release to release


def _known(cls: Any, **strategies: Any) -> dict[str, Any]:
    """Those of them that the installed torch has an attribute for."""
    return {name: each for name, each in strategies.items() if name in cls.__dataclass_fields__}


bools = st.booleans()
small = st.integers(0, 5)
some = st.lists(small, max_size=3)


class Note:
    """Something that a user's subclass remembers."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Note) and self.said == other.said

    __hash__ = None  # type: ignore[assignment]


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


plain = st.recursive(
    st.none()
    | bools
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from([torch.float32, torch.device("meta"), torch.channels_last, TwoTensor]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | small, inner, max_size=3)
        | st.frozensets(small, max_size=3)
        | st.builds(Note, inner)
    ),
    max_leaves=6,
)


def _is_supported(info: Any) -> bool:
    try:
        return info.mutation_type is not None
    except AssertionError:  # torch refuses some combinations
        return False


def _input_info(**flags: bool) -> Any:
    flags["mutates_metadata"] |= flags["mutates_storage_metadata"]
    return schemas.InputAliasInfo(**flags)


input_infos = st.builds(
    _input_info, **dict.fromkeys(schemas.InputAliasInfo.__dataclass_fields__, bools)
).filter(_is_supported)


@functools.cache
def _view_sequences() -> list[Any]:
    """What torch keeps of views of a base."""
    made, plain_base = [], torch.ones(4, 6)
    torch._enable_functionalization(reapply_views=True)
    try:
        base = torch._to_functional_tensor(plain_base)
        for view in (base.t(), base[1:3], base.view(24)[2:].view(2, 11), base):
            sequence = ViewMetaSequence.__new__(ViewMetaSequence)
            sequence.sequence = _functionalization.get_view_meta_sequence(view)
            sequence.metadata = MetadataKey.make(view)
            made.append(sequence)
    finally:
        torch._disable_functionalization()
    return made


output_infos = st.builds(
    schemas.OutputAliasInfo,
    output_type=st.sampled_from([*schemas.OutputType]),
    raw_type=st.sampled_from([torch.Tensor, torch.SymInt, int, TwoTensor]),
    base_idx=_maybe(small),
    dynamic_dims=_maybe(st.sets(small, max_size=3)),
    requires_grad=bools,
    **_known(schemas.OutputAliasInfo, requires_grad_for_backward=bools),
    view_meta_sequence=_maybe(st.deferred(lambda: st.sampled_from(_view_sequences()))),
)
layouts = st.builds(
    schemas.MemoryFormatMeta,
    size=_maybe(some.map(torch.Size)),
    stride=_maybe(some.map(tuple)),
    memory_format=_maybe(st.sampled_from([torch.contiguous_format, torch.channels_last])),
)
symbols = st.lists(bools, max_size=2).map(tuple)
plain_metas = st.builds(
    schemas.PlainTensorMeta,
    small,
    _maybe(layouts),
    **_known(
        schemas.PlainTensorMeta,
        size_symbol_placeholders=symbols,
        stride_symbol_placeholders=symbols,
    ),
)
# torch 2.11 has no such class.
opaque_metas: st.SearchStrategy[Any] = (
    st.builds(schemas.OpaqueMeta) if hasattr(schemas, "OpaqueMeta") else st.nothing()
)


def _subclass(attrs: Any, sizes: Any, meta: Any, symints: bool, layout: Any, at: int) -> Any:
    with FakeTensorMode():
        fake = torch.empty(2)
    made = schemas.SubclassCreationMeta(
        at, len(attrs), symints, attrs, *sizes, meta, fake, memory_format=layout
    )
    made.original_subclass, made.original_subclass_type = None, TwoTensor  # as at run time
    return made


subclass_metas = st.recursive(
    plain_metas,
    lambda inner: st.builds(
        _subclass,
        st.dictionaries(st.text("ab_", min_size=1, max_size=3), inner | opaque_metas, max_size=2),
        st.tuples(*[st.lists(_maybe(small), max_size=2).map(tuple)] * 2),
        plain,
        bools,
        _maybe(layouts),
        small,
    ),
    max_leaves=4,
)
descs = st.builds(descriptors.TangentAOTInput, st.builds(descriptors.PlainAOTOutput, small))


def _tangent(size: list[int], wrapped: bool) -> Any:
    with FakeTensorMode():
        fake = torch.empty(size)
        return TwoTensor(fake, fake.clone()) if wrapped else fake


tangents = st.builds(_tangent, some, bools)


@st.composite
def metadata(draw: st.DrawFn) -> Any:
    """A ``ViewAndMutationMeta``, with what torch computes of it."""
    lists: dict[str, Any] = {
        "input_info": input_infos,
        "output_info": output_infos,
        "traced_tangents": tangents,
        "traced_tangents_descs": descs,
        "subclass_inp_meta": subclass_metas,
        "subclass_fw_graph_out_meta": subclass_metas,
        "subclass_tangent_meta": subclass_metas,
    }
    others: dict[str, Any] = {
        "num_intermediate_bases": small,
        "keep_input_mutations": bools,
        "traced_tangent_metas": _maybe(st.lists(_maybe(st.tuples(st.just(["a"]), plain)))),
        "num_symints_saved_for_bw": _maybe(small),
        "num_tensors_saved_with_no_vc_check": _maybe(small),
        "num_opaque_objects_saved_for_bw": _maybe(small),
        "grad_enabled_mutation": _maybe(bools),
        "deterministic": _maybe(bools),
        "static_input_indices": some,
        "act_input_indices": some,
        "act_input_paths": st.lists(st.tuples(small, st.just(("a", "b"))), max_size=2),
        "saved_tensor_is_graph_input": st.lists(bools, max_size=2),
        "is_train": bools,
        "indices_of_inputs_that_requires_grad_with_mutations_in_bw": some,
        "bw_donated_idxs": _maybe(some),
        "num_backward_tokens": small,
        "num_graphsafe_rng_states": small,
        "graphsafe_rng_state_index": _maybe(small),
        "graphsafe_rng_device": _maybe(
            st.sampled_from([torch.device("cpu"), torch.device("meta")])
        ),
        "mutated_inp_stream_indices": _maybe(st.lists(_maybe(small), max_size=2)),
        "compile_id_str": _maybe(st.text(max_size=5)),
        "tangent_source_stack_traces": _maybe(st.lists(_maybe(st.text(max_size=9)), max_size=2)),
    }
    chosen = {name: draw(st.lists(each, max_size=2)) for name, each in lists.items()}
    known = _known(schemas.ViewAndMutationMeta, **others)
    chosen |= {name: draw(each) for name, each in known.items()}
    made = schemas.ViewAndMutationMeta(**chosen)
    made.dynamic_saved_tensors_idxs = draw(st.dictionaries(small, st.sets(small), max_size=2))
    made.is_rng_op_functionalized = draw(bools)
    made.tokens = dict.fromkeys(draw(some), torch.empty(0))
    return made


@st.composite
def signatures(draw: st.DrawFn) -> Any:
    """A ``SubclassMeta``: metadata of the inner graph, and of its gradients."""
    made = schemas.SubclassMeta()
    made.fw_metadata = draw(metadata())
    made.grad_input_metas = draw(_maybe(st.lists(subclass_metas, max_size=2)))
    return made


configs = st.builds(
    # Until torch 2.12 entries hold the whole configuration, less functions.
    getattr(schemas, "CacheableAOTConfig", None)
    or functools.partial(schemas.AOTConfig, None, None, None, None),
    num_params_buffers=small,
    aot_id=small,
    keep_inference_input_mutations=bools,
    is_export=st.just(False),
    no_tangents=bools,
    dynamic_shapes=bools,
    aot_autograd_arg_pos_to_source=_maybe(
        st.lists(
            st.builds(
                lambda name, member: torch._dynamo.source.AttrSource(
                    torch._dynamo.source.LocalSource(name), member
                ),
                *[st.text("xyz", min_size=1, max_size=3)] * 2,
            ),
            max_size=2,
        )
    ),
    static_input_indices=_maybe(some),
    enable_log=bools,
    precompile_backend_id=_maybe(st.text(max_size=5)),
)


# -- changes


def changed(theirs: Any) -> Iterator[tuple[str, Any]]:
    """Copies of an object of torch, each with another change to one attribute of it or below it."""
    for name, value in attributes(theirs).items():
        for what, other in _others(value):
            made = copy.copy(theirs)
            object.__setattr__(made, name, other)
            yield f".{name}{what}", made
    made = copy.copy(theirs)
    object.__setattr__(made, "added_by_a_newer_torch", 1)
    yield ".added_by_a_newer_torch", made


def _others(value: Any) -> Iterator[tuple[str, Any]]:
    """The same value but for one change, once for each part of it."""
    if value is None or isinstance(value, (type, torch.device, torch.memory_format)):
        yield "", "changed"
    elif isinstance(value, bool):
        yield "", not value
    elif isinstance(value, (int, float)):
        yield "", 0.25 if value != 0.25 else 0.5
        yield " as text", str(value)
    elif isinstance(value, str):
        yield "", value + "x"
    elif isinstance(value, Enum):
        yield "", next(other for other in type(value) if other is not value)
        yield " as text", value.name
    elif isinstance(value, (set, frozenset)):
        yield "", {*value, 99}
    elif isinstance(value, dict):
        yield " more", {**value, "more": 1}
        for key, member in value.items():
            yield f"[{key}] gone", {k: v for k, v in value.items() if k != key}
            for what, other in _others(member):
                yield f"[{key}]{what}", {**value, key: other}
    elif isinstance(value, (list, tuple)):
        yield " more", [*value, 99]
        for index, member in enumerate(value):
            yield f"[{index}] gone", [*value[:index], *value[index + 1 :]]
            for what, other in _others(member):
                yield f"[{index}]{what}", [*value[:index], other, *value[index + 1 :]]
    elif isinstance(value, torch.Tensor):
        yield "", _tangent([7, 7], wrapped=True)
    elif is_dataclass(value) and not isinstance(value, torch._guards.Source):
        yield from changed(value)
    else:
        yield "", 99
