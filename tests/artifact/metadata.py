"""Runtime metadata of torch's with every kind of value, and that with any one attribute changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
from torch._C import _functionalization
from torch._dynamo.source import AttrSource, LocalSource
from torch._functorch._aot_autograd import descriptors
from torch._functorch._aot_autograd import schemas as torch_schemas
from torch._functorch._aot_autograd.functional_utils import MetadataKey, ViewMetaSequence
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.descriptions import attributes

__all__ = ["changed", "config", "metadata", "subclasses"]

schemas: Any = torch_schemas  # whose arguments differ from release to release


class Note:
    """Something that a user's subclass remembers."""

    def __init__(self, said: Any) -> None:
        self.said = said

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Note) and self.said == other.said

    __hash__ = None  # type: ignore[assignment]


PLAIN = [
    *(None, True, 1, 1 << 70, 0.5, "text", b"\xff", torch.float32, torch.device("meta")),
    *(torch.channels_last, TwoTensor, frozenset({1, 2}), Note({"a": (1, [2])}), {3: "by number"}),
    {"nested": [(), {"": {}}]},
]


def _make(cls: Any, **values: Any) -> Any:
    """Return an object with those of the values that the installed torch has an attribute for."""
    return cls(**{name: each for name, each in values.items() if name in cls.__dataclass_fields__})


def _fake(*size: int) -> Any:
    with FakeTensorMode():
        return torch.empty(size)


def _views() -> list[Any]:
    """Return what torch keeps of views of a base."""
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


def _input(*flags: str) -> Any:
    names = schemas.InputAliasInfo.__dataclass_fields__
    return schemas.InputAliasInfo(**{name: name in flags for name in names})


def _output(kind: Any, views: Any, index: int) -> Any:
    return _make(
        schemas.OutputAliasInfo,
        output_type=kind,
        raw_type=(torch.Tensor, torch.SymInt, int, TwoTensor)[index % 4],
        base_idx=index % 3 or None,
        dynamic_dims={0, index} if index % 2 else None,
        requires_grad=index % 2 == 0,
        requires_grad_for_backward=True,
        view_meta_sequence=views,
    )


def _subclass(attrs: dict[str, Any], meta: Any = None) -> Any:
    layout = schemas.MemoryFormatMeta(
        size=torch.Size([2, 3]), stride=(3, 1), memory_format=torch.channels_last
    )
    made = schemas.SubclassCreationMeta(
        1, len(attrs), True, attrs, (2, None), (None, 1), meta, _fake(2), memory_format=layout
    )
    made.original_subclass, made.original_subclass_type = None, TwoTensor  # as at run time
    return made


def _creations() -> list[Any]:
    plain = _make(
        schemas.PlainTensorMeta,
        unwrapped_idx=2,
        size_symbol_placeholders=(True, False),
        stride_symbol_placeholders=(),
    )
    attrs = {"a": plain}
    if hasattr(schemas, "OpaqueMeta"):  # torch 2.11 has no such class
        attrs["b"] = schemas.OpaqueMeta()
    return [plain, _subclass({"inner": _subclass(attrs, PLAIN), "c": plain})]


def metadata() -> Any:
    """Return a ``ViewAndMutationMeta``, with what torch computes of it."""
    views = [*_views(), None]
    tangent = TwoTensor(_fake(2, 3), _fake(2, 3))
    made = _make(
        schemas.ViewAndMutationMeta,
        input_info=[_input(), _input("mutates_data", "requires_grad", "is_leaf")],
        output_info=[
            _output(kind, views[index % len(views)], index)
            for index, kind in enumerate([*schemas.OutputType][:4])
        ],
        num_intermediate_bases=1,
        keep_input_mutations=True,
        traced_tangents=[_fake(2, 3), tangent],
        traced_tangents_descs=[descriptors.TangentAOTInput(descriptors.PlainAOTOutput(0))],
        subclass_inp_meta=_creations(),
        subclass_fw_graph_out_meta=_creations()[:1],
        subclass_tangent_meta=_creations()[:1],
        traced_tangent_metas=[None, (["a"], 1)],
        num_symints_saved_for_bw=2,
        num_tensors_saved_with_no_vc_check=1,
        num_opaque_objects_saved_for_bw=None,
        grad_enabled_mutation=None,
        deterministic=False,
        static_input_indices=[0, 3],
        act_input_indices=[1],
        act_input_paths=[(1, ("a", "b"))],
        saved_tensor_is_graph_input=[True, False],
        is_train=True,
        indices_of_inputs_that_requires_grad_with_mutations_in_bw=[1],
        bw_donated_idxs=[0],
        num_backward_tokens=0,
        num_graphsafe_rng_states=1,
        graphsafe_rng_state_index=0,
        graphsafe_rng_device=torch.device("cpu"),
        mutated_inp_stream_indices=[None, 1],
        compile_id_str="0/0",
        tangent_source_stack_traces=[None, "File x"],
    )
    made.dynamic_saved_tensors_idxs = {1: {0, 2}}
    made.is_rng_op_functionalized = True
    made.tokens = {0: torch.empty(0)}
    return made


def subclasses() -> Any:
    """Return a ``SubclassMeta``: metadata of the inner graph, and of its gradients."""
    made = schemas.SubclassMeta()
    made.fw_metadata, made.grad_input_metas = metadata(), _creations()[:1]
    made.fw_metadata.subclass_inp_meta, made.fw_metadata.output_info = [], []
    return made


def config() -> Any:
    """Return what an entry keeps of the configuration: until torch 2.12 all, less functions."""
    cls = getattr(schemas, "CacheableAOTConfig", None)
    values = {
        "num_params_buffers": 2,
        "aot_id": 5,
        "keep_inference_input_mutations": True,
        "is_export": False,
        "no_tangents": False,
        "dynamic_shapes": True,
        "aot_autograd_arg_pos_to_source": [AttrSource(LocalSource("x"), "weight")],
        "static_input_indices": [0],
        "enable_log": True,
        "precompile_backend_id": "id",
    }
    if cls is None:
        return functools.partial(schemas.AOTConfig, None, None, None, None)(**values)
    return cls(**values)


# -- changes


def changed(theirs: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of an object of torch, each with one change to it or to what it holds."""
    for name, value in attributes(theirs).items():
        for what, other in _others(value):
            made = copy.copy(theirs)
            object.__setattr__(made, name, other)
            yield f".{name}{what}", made
    made = copy.copy(theirs)
    object.__setattr__(made, "added_by_a_newer_torch", 1)
    yield ".added_by_a_newer_torch", made


def _others(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the same value with one change, for each item and attribute of it."""
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
        yield "", TwoTensor(_fake(7, 7), _fake(7, 7))
    elif is_dataclass(value) and not isinstance(value, torch._guards.Source):
        yield from changed(value)
    else:
        yield "", 99
