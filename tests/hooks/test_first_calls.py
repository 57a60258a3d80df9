"""Outputs of a first call on fake tensors are described, saved, and made again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgpack  # type: ignore[import-untyped]
import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from s3cache.errors import CorruptError
from s3cache.hooks._first_calls import describe_outputs, fake_first_call
from s3cache.hooks._rebuild import NotSharableError


def metadata(**changes: Any) -> Any:
    plain: dict[str, Any] = {
        "tokens": {},
        "is_rng_op_functionalized": False,
        "subclass_inp_meta": (),
        "subclass_fw_graph_out_meta": (),
        "num_forward": 9,
    }
    return SimpleNamespace(**{**plain, **changes})


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


def answered(mode: FakeTensorMode, described: Any) -> list[Any]:
    """Return the outputs of an entry's first call on fake tensors; the second call is real."""
    real = object()
    forward = SimpleNamespace(post_compile=lambda: lambda inputs: real)
    entry = cast("Any", SimpleNamespace(compiled_fw=forward, runtime_metadata=metadata()))
    context = TracingContext(mode)
    with tracing(context):
        fake_first_call(entry, described)
    assert context.fw_metadata is entry.runtime_metadata
    function = forward.post_compile()
    outputs = function([])
    assert function([]) is real
    return cast("list[Any]", outputs)


def test_outputs_that_cannot_be_described_are_refused(mode: FakeTensorMode) -> None:
    with mode:
        base = torch.empty(4, 3)
        refused: list[tuple[list[Any], Any]] = [
            ([torch.empty(2, dtype=torch.complex64).conj()], metadata()),
            ([torch.nn.Parameter(torch.empty(2)).to_sparse()], metadata()),
            ([1.5], metadata()),
            ([base], metadata(tokens={"print": 1})),
            ([base], metadata(is_rng_op_functionalized=True)),
            ([base], metadata(subclass_inp_meta=(object(),))),
        ]
    for outputs, about in refused:
        with pytest.raises(NotSharableError):
            describe_outputs(outputs, about)


def test_views_keep_their_shared_storage_its_size_and_their_offsets(mode: FakeTensorMode) -> None:
    size: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    given = mode.from_tensor(
        torch.empty(6, 5), symbolic_context=size, source=ConstantSource("given")
    )
    with mode:
        base, other = given + 1, torch.empty(8)
        before = [base[1:], base.t(), base.view(torch.int32)[:, 2], other[3:], other[:2]]
    described = describe_outputs(before, metadata())
    after = answered(mode, msgpack.unpackb(msgpack.packb(described)))
    assert describe_outputs(after, metadata()) == described
    storages = [output.untyped_storage()._cdata for output in after]
    assert [storages.index(storage) for storage in storages] == [0, 0, 0, 3, 3]
    for one, again in zip(before, after, strict=True):
        assert str(again.storage_offset()) == str(one.storage_offset())
        assert str(again.untyped_storage().nbytes()) == str(one.untyped_storage().nbytes())


GOOD = {
    "size": ["2"], "stride": ["1"], "offset": "0", "bytes": "8", "dtype": "float32",
    "device": "cpu", "requires_grad": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "described",
    [
        *(None, [{"same": 3}], [{"number": "s999"}], [{"size": ["2"]}]),
        [{**GOOD, "dtype": "load"}],
        [{name: value for name, value in {**GOOD, "within": 1}.items() if name != "bytes"}],
    ],
)
def test_an_invalid_description_is_a_corrupt_entry(mode: FakeTensorMode, described: Any) -> None:
    assert answered(mode, [GOOD])
    with pytest.raises(CorruptError):
        answered(mode, described)
