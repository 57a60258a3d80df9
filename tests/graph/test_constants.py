"""Changed numbers, strings and tables in torch's code generators are in the key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch._refs
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch._inductor import lowering, metrics, utils
from torch._inductor.codegen import cpp, cpp_gemm_template, cpp_utils
from torch._subclasses import fake_tensor
from torch.utils._ordered_set import OrderedSet

from s3cache.graph._origin import is_same_value
from tests.graph.checking import key_of
from tests.support.machines import Machine
from tests.support.marks import nightly


@pytest.mark.parametrize(
    ("owner", "name", "values"),
    [
        (cpp_gemm_template, "GEMM_TEMPLATE", ["mine", "yours", 5, None]),
        (cpp_utils, "INDEX_TYPE", ["int32_t", ("int64_t",)]),
        (cpp, "VECTORIZABLE_DTYPES", [[torch.float], [torch.double], [torch.double, torch.float]]),
        (cpp, "VECTORIZABLE_RTYPES", [OrderedSet(["sum"]), OrderedSet(["sum", "max"])]),
        (utils, "ceildiv", [None, 3]),
        (cpp.CppVecOverrides, "exp", [None, "exp"]),
    ],
)
def test_a_replaced_value_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, values: list[Any]
) -> None:
    plain = key_of()
    found = []
    for value in (*values, *values):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            found.append(key_of())
    assert found[: len(values)] == found[len(values) :]
    assert len({plain, None, *found}) == len(values) + 2
    assert key_of() == plain


def test_an_equal_value_does_not_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key_of()
    monkeypatch.setattr(cpp_utils, "INDEX_TYPE", f"int{64}_t")
    monkeypatch.setattr(cpp, "VECTORIZABLE_DTYPES", list(cpp.VECTORIZABLE_DTYPES))
    assert key_of() == plain


_TYPES: Any = cpp_utils.DTYPE_TO_CPP
_VECTORIZED: Any = cpp.VECTORIZABLE_DTYPES
_REDUCED: Any = cpp.VECTORIZABLE_RTYPES
_REALIZED: Any = lowering.needs_realized_inputs
_SOME = [op for op in _REALIZED if isinstance(op, torch._ops.OpOverload)]


@pytest.mark.parametrize(
    "change",
    [
        lambda by: _TYPES.update({torch.float: f"float{by}"}),
        lambda by: _TYPES.update({f"mine{by}": "float"}),
        lambda by: _TYPES.pop(torch.float if by == 2 else torch.half),
        lambda by: _VECTORIZED.append(torch.complex64 if by == 2 else torch.int8),
        lambda by: _VECTORIZED.pop(by),
        lambda by: _VECTORIZED.__setitem__(0, torch.complex64 if by == 2 else None),
        lambda by: _REDUCED.discard("max" if by == 2 else "min"),
        lambda by: _REDUCED.add(f"mine{by}"),
        lambda by: _REALIZED.remove(_SOME[by]),
        lambda by: _TYPES.update({key: _TYPES.pop(key) for key in list(_TYPES)[:by]}),  # the order
        lambda by: _VECTORIZED.insert(0, _VECTORIZED.pop(by)),
    ],
)
def test_a_changed_table_is_in_the_key(change: Callable[[int], Any]) -> None:
    tables = _TYPES, _VECTORIZED, _REDUCED, _REALIZED
    before = [each.copy() if isinstance(each, dict) else list(each) for each in tables]
    plain = key_of()
    found = []
    for by in (2, 3, 2):
        change(by)
        found.append(key_of())
        for table, then in zip(tables, before, strict=True):
            table.clear()
            (table.extend if isinstance(table, list) else table.update)(then)
    assert found[0] == found[2] != found[1]
    assert len({plain, None, *found}) == 4


def test_counters_of_torch_are_in_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key_of()
    monkeypatch.setattr(metrics, "generated_kernel_count", 99)
    monkeypatch.setattr(fake_tensor.FakeTensorMode, "cache_hits", 99)
    torch.compile(lambda x: x.sin() + 1)(torch.ones(4, 4))
    assert key_of() == plain


# -- values that torch itself changes while it compiles


def _keys_before_and_after_compiles() -> list[Any]:
    found = [key_of()]
    for mode, dynamic in (("default", True), ("max-autotune-no-cudagraphs", False)):
        compiled = torch.compile(_busy, mode=mode, dynamic=dynamic)
        compiled(torch.ones(2, 3, 9, 9, requires_grad=True)).backward()
    return [*found, key_of()]


def _busy(x: torch.Tensor) -> torch.Tensor:
    y = F.dropout(F.conv2d(x, torch.ones(3, 3, 3, 3)), 0.5)
    return y.std() + x.sort()[0].sum() + x.cumsum(0).mean() + (x.flatten(1) @ x.flatten(1).T).sum()


@nightly
@pytest.mark.timeout(900)
def test_compiles_do_not_change_a_key(tmp_path: Path) -> None:
    before, after = Machine(tmp_path).run(f"{__name__}:_keys_before_and_after_compiles").result
    assert before == after
    assert before is not None


class _Equal:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def test_an_object_that_claims_to_equal_a_value_is_not_the_same() -> None:
    for had, value in ((1, True), (1, 1.0), ((1,), (_Equal(),)), ({"a": 1}, {"a": _Equal()})):
        assert not is_same_value(had, value)
    assert is_same_value({"a": (1, 2)}, {"a": (1, 2)})
