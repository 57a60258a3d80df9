"""Headers that an earlier s3cache wrote are read, and say what they said."""

from __future__ import annotations

from typing import Any

import pytest

from s3cache import frame
from s3cache.artifact import (
    GraphDescription,
    InputAliasInfo,
    OutputAliasInfo,
    PlainTensorMeta,
    SubclassCreationMeta,
    ViewAndMutationMeta,
    ViewMeta,
    ViewMetaSequence,
    description,
)
from s3cache.errors import CorruptError

OLD: dict[str, Any] = {
    "inputs": [{"is_leaf": True, "mutates_data": True, "mutation_type": "MUTATED_IN_GRAPH"}],
    "outputs": [
        {
            "output_type": "alias_of_input",
            "raw_type": "torch.Tensor",
            "base_idx": 0,
            "dynamic_dims": [1],
            "view_meta_sequence": [{"type": "t_ViewMeta", "arguments": [False, True]}],
        },
        {"output_type": "non_alias", "base_idx": None, "view_meta_sequence": []},
    ],
    "subclasses": {
        "inputs": [
            {"type": "plain", "unwrapped_idx": 0},
            {
                "type": "a.TwoTensor",
                "flat_tensor_start_idx": 1,
                "arg_count": 2,
                "attrs": {"a": {"type": "plain", "unwrapped_idx": 1}},
                "outer_size": [4, None],
                "outer_stride": [1, 1],
            },
        ],
        "outputs": [],
        "tangents": [],
    },
    "num_intermediate_bases": 0,
    "num_symints_saved_for_bw": None,
    "num_tokens": 0,
    "static_input_indices": [0],
    "wrappers": ["AOTDedupeWrapper"],
    "has_backward": False,
    "has_backward_module": False,
}


def read(runtime: object) -> GraphDescription | None:
    content = frame.encode(kind="aot", key="abc", sections={}, meta={"runtime": runtime})
    return description(frame.decode_header(content))


def test_an_older_header_says_what_it_said() -> None:
    assert read(OLD) == GraphDescription(
        runtime_metadata=ViewAndMutationMeta(
            input_info=(
                InputAliasInfo(is_leaf=True, mutates_data=True, mutation_type="MUTATED_IN_GRAPH"),
            ),
            output_info=(
                OutputAliasInfo(
                    output_type="alias_of_input",
                    raw_type="torch.Tensor",  # type: ignore[arg-type]
                    base_idx=0,
                    dynamic_dims=frozenset({1}),
                    view_meta_sequence=ViewMetaSequence(
                        sequence=(ViewMeta(type="t_ViewMeta", arguments=(False, True)),)
                    ),
                ),
                OutputAliasInfo(output_type="non_alias"),
            ),
            subclass_inp_meta=(
                PlainTensorMeta(unwrapped_idx=0),
                SubclassCreationMeta(
                    flat_tensor_start_idx=1,
                    arg_count=2,
                    attrs={"a": PlainTensorMeta(unwrapped_idx=1)},
                    outer_size=(4, None),
                    outer_stride=(1, 1),
                    original_subclass_type="a.TwoTensor",  # type: ignore[arg-type]
                ),
            ),
            num_intermediate_bases=0,
            static_input_indices=(0,),
            extra={"num_tokens": 0},
        ),
        dispatch_wrappers=("AOTDedupeWrapper",),
        has_backward_module=False,
    )


def test_a_header_without_a_description_has_none() -> None:
    assert read(None) is None
    assert description(frame.decode_header(frame.encode(kind="aot", key="a", sections={}))) is None


def test_a_backward_is_known_to_be_there() -> None:
    whole = read({**OLD, "has_backward": True})
    assert whole is not None
    assert whole.backward is not None


@pytest.mark.parametrize("name", ["inputs", "outputs", "subclasses"])
@pytest.mark.parametrize("value", [1, "text", [7], {"a": 1}])
def test_what_is_no_description_is_a_corrupt_entry(name: str, value: object) -> None:
    with pytest.raises(CorruptError):
        read({**OLD, name: value})
