"""The key has every object in torch's code generators that is not torch's own."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch._inductor import ir, lowering, metrics, scheduler, utils
from torch._inductor.codegen import cpp, cpp_gemm_template, cpp_utils
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
from torch._inductor.fx_passes import post_grad
from torch._prims_common import wrappers
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor
from torch.utils._ordered_set import OrderedSet

import s3cache
from s3cache.graph._origin import is_same_value
from s3cache.graph._overrides import all_overrides
from tests.graph.checking import checked, codes, key_of, put
from tests.support.machines import Machine
from tests.support.marks import nightly, slow

Change = Callable[[Any], contextlib.AbstractContextManager[object]]


def _check_keys(change: Change, values: list[Any]) -> None:
    """Check that each value gives its own key, and the same key again."""
    plain, found = key_of(), []
    for value in (*values, values[0]):
        with change(value):
            found.append(key_of())
    assert found.pop() == found[0]
    assert len({plain, None, *found}) == len(values) + 2
    assert key_of() == plain


_VALUES: list[tuple[Any, str, list[Any]]] = [
    (cpp_gemm_template, "GEMM_TEMPLATE", ["mine", 5, None]),
    (cpp, "VECTORIZABLE_RTYPES", [OrderedSet(["sum"]), OrderedSet(["sum", "max"])]),
    (utils, "ceildiv", [None, 3]),
    # Objects of torch from another place
    (CppVecOverrides, "exp", [CppVecOverrides.log, None, vars(CppVecOverrides)["log"]]),
    (ir, "Pointwise", [ir.Reduction]),
    (lowering, "ir", [scheduler]),
]
_MORE_VALUES: list[tuple[Any, str, list[Any]]] = [
    (cpp_utils, "INDEX_TYPE", ["int32_t", ("int64_t",)]),
    (cpp, "VECTORIZABLE_DTYPES", [[torch.float], [torch.double], [torch.double, torch.float]]),
    (post_grad, "remove_noop_ops", [post_grad.remove_assert_ops]),
    (CppVecOverrides, "exp", ["exp"]),
    (CppVecOverrides, "sin", [CppOverrides.sin]),
]


@pytest.mark.parametrize(
    ("owner", "name", "values"),
    [*_VALUES, *(pytest.param(*each, marks=slow) for each in _MORE_VALUES)],
)
def test_a_replaced_value_is_in_the_key(owner: Any, name: str, values: list[Any]) -> None:
    there = inspect.getattr_static(owner, name)
    _check_keys(functools.partial(put, owner, name), values)
    assert inspect.getattr_static(owner, name) is there


_TYPES: Any = cpp_utils.DTYPE_TO_CPP
_VECTORIZED: Any = cpp.VECTORIZABLE_DTYPES
_REDUCED: Any = cpp.VECTORIZABLE_RTYPES
_REALIZED: Any = lowering.needs_realized_inputs
_SOME = [op for op in _REALIZED if isinstance(op, torch._ops.OpOverload)]


_CHANGES: list[Callable[[int], Any]] = [
    lambda by: _TYPES.update({torch.float: f"float{by}"}),
    lambda by: _TYPES.update({f"mine{by}": "float"}),
    lambda by: _VECTORIZED.pop(by),
    lambda by: _REDUCED.add(f"mine{by}"),
    lambda by: _TYPES.update({key: _TYPES.pop(key) for key in list(_TYPES)[:by]}),  # the order
]
_MORE_CHANGES: list[Callable[[int], Any]] = [
    lambda by: _TYPES.pop(torch.float if by == 2 else torch.half),
    lambda by: _VECTORIZED.append(torch.complex64 if by == 2 else torch.int8),
    lambda by: _VECTORIZED.__setitem__(0, torch.complex64 if by == 2 else None),
    lambda by: _REDUCED.discard("max" if by == 2 else "min"),
    lambda by: _REALIZED.remove(_SOME[by]),
    lambda by: _VECTORIZED.insert(0, _VECTORIZED.pop(by)),
]


@pytest.mark.parametrize(
    "change", [*_CHANGES, *(pytest.param(each, marks=slow) for each in _MORE_CHANGES)]
)
def test_a_changed_table_is_in_the_key(change: Callable[[int], Any]) -> None:
    tables = _TYPES, _VECTORIZED, _REDUCED, _REALIZED
    before = [table.copy() if isinstance(table, dict) else list(table) for table in tables]

    @contextlib.contextmanager
    def changed(by: int) -> Iterator[None]:
        change(by)
        yield
        for table, content in zip(tables, before, strict=True):
            table.clear()
            (table.extend if isinstance(table, list) else table.update)(content)

    _check_keys(changed, [2, 3])


_LIBRARY = """
import functools
def scaled(original, by, *args, **kwargs): return original(*args, **kwargs), by
def plainly(original, by): return lambda *args, **kwargs: scaled(original, by, *args, **kwargs)
def wrapping(original, by): return functools.wraps(original)(plainly(original, by))
class Callable:
    def __init__(self, by): self.by = by
    def __call__(self, *args): return args, self.by
"""
Make = Callable[[Any, Any, float], Any]
_MORE: list[tuple[Any, str, Make]] = [
    (CppVecOverrides, "exp", lambda of, old, by: staticmethod(of.plainly(old.__func__, by))),
    (post_grad, "remove_noop_ops", lambda of, old, by: of.plainly(old, by)),
    (post_grad, "remove_noop_ops", lambda of, old, by: functools.partial(of.scaled, old, by)),
    (post_grad, "remove_noop_ops", lambda of, _, by: of.Callable(by)),
    (post_grad, "remove_noop_ops", lambda of, old, by: functools.cache(of.plainly(old, by))),
    (post_grad, "remove_noop_ops", lambda of, old, by: torch.no_grad()(of.plainly(old, by))),
    (proxy_tensor, "proxy_call", lambda of, old, by: of.plainly(old, by)),
    (wrappers, "_resize_output_check", lambda of, old, by: of.plainly(old, by)),
    (scheduler.Scheduler, "can_fuse", lambda of, old, by: of.plainly(old, by)),
    (ir.Pointwise, "create", lambda of, old, by: classmethod(of.plainly(old.__func__, by))),
    (ir.Buffer, "dtype", lambda of, old, by: property(of.plainly(old.fget, by))),
]


@pytest.mark.parametrize(
    ("owner", "name", "make"),
    [
        (post_grad, "remove_noop_ops", lambda of, old, by: of.wrapping(old, by)),
        pytest.param(*_MORE[-1], marks=slow),
        *(pytest.param(*each, marks=nightly) for each in _MORE[:-1]),
    ],
)
def test_a_replacement_by_a_library_is_in_the_key(
    install: Callable[[str], Any], owner: Any, name: str, make: Make
) -> None:
    library, there = install(_LIBRARY), inspect.getattr_static(owner, name)
    _check_keys(lambda by: put(owner, name, make(library, there, by)), [2.0, 3.0])


def _plainly(original: Any, by: float) -> Any:
    return lambda *args, **kwargs: (original(*args, **kwargs), by)


def test_the_reason_for_an_unidentified_replacement_names_its_place() -> None:
    module, whole = types.ModuleType("mine"), types.ModuleType(post_grad.__name__)
    vars(module).update({name: each for name, each in vars(ir).items() if name[0] != "_"})
    vars(whole).update(vars(post_grad), remove_noop_ops=_plainly(post_grad.remove_noop_ops, 2.0))
    plain = key_of()
    for owner, name, double in (
        (post_grad, "remove_noop_ops", Mock()),
        (post_grad, "remove_noop_ops", lambda *_: None),
        (ir, "Pointwise", type("Pointwise", (ir.Pointwise,), {})),
        (lowering, "ir", module),
    ):
        with put(owner, name, double):
            (reason,) = checked().reasons
        assert (reason.code, reason.blocks_fx_level) == ("generator", True)
        assert f"{owner.__name__}.{name}" in reason.message
    with pytest.MonkeyPatch.context() as patched:  # torch imports from it while it compiles
        patched.setitem(sys.modules, post_grad.__name__, whole)
        (reason,) = checked().reasons
    assert "torch._inductor.fx_passes.post_grad was replaced" in reason.message
    assert key_of() == plain


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (post_grad.remove_noop_ops, "__code__", (lambda *args: args).__code__),
        (vars(CppVecOverrides)["exp"].__func__, "__code__", (lambda *args: args).__code__),
        (post_grad.register_lowering_pattern, "__defaults__", (lambda *_: False, 2)),
    ],
)
def test_a_change_inside_a_function_of_torch_has_no_identity(
    owner: Any, name: str, other: Any
) -> None:
    """Every name keeps its object."""
    plain = key_of()
    with put(owner, name, other):
        assert codes() == ["generator"]
    assert key_of() == plain


class _Alike:
    """An object that claims to equal any other."""

    def __call__(self, *args: Any) -> Any:
        return args

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def test_an_object_that_claims_to_equal_a_value_is_not_the_same() -> None:
    plain = key_of()
    for owner, name in ((post_grad, "remove_noop_ops"), (F, "gelu")):
        with put(owner, name, _Alike()):
            assert key_of() != plain
    for old, new in ((1, True), (1, 1.0), ((1,), (_Alike(),)), ({"a": 1}, {"a": _Alike()})):
        assert not is_same_value(old, new)
    assert is_same_value({"a": (1, 2)}, {"a": (1, 2)})


def test_changes_that_do_not_affect_code_are_in_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own wrappers and counters, equal values, added names, and hooks of s3cache."""
    plain = key_of()
    hidden = torch.compiler.disable(post_grad.remove_noop_ops)
    monkeypatch.setattr(post_grad, "remove_noop_ops", hidden)
    monkeypatch.setattr(post_grad, "s3cache_number", 7, raising=False)
    monkeypatch.setattr(cpp_utils, "INDEX_TYPE", f"int{64}_t")
    monkeypatch.setattr(cpp, "VECTORIZABLE_DTYPES", list(cpp.VECTORIZABLE_DTYPES))
    monkeypatch.setattr(metrics, "generated_kernel_count", 99)
    monkeypatch.setattr(fake_tensor.FakeTensorMode, "cache_hits", 99)
    x = torch.ones(3)
    torch.cond(x.sum() > 1, lambda x: x + 1, lambda x: x - 1, (x,))  # without torch.compile
    added = vars(sys.modules["torch._higher_order_ops.cond"])
    assert any(name.startswith("__compiled_fn_") for name in added)
    assert key_of() == plain
    with s3cache.enabled(local_dir=tmp_path):
        assert key_of() == plain
        assert all_overrides() == []


# Some register operators of torch.
_LATE = [
    "distributed.tensor",
    "distributed._symmetric_memory",
    "nn.attention.flex_attention",
    "export",
    "onnx",
    "ao.quantization.fx._decomposed",
]


def _codes_and_keys() -> list[Any]:
    """Return the codes with replaced functions, then keys and overrides without them."""
    exp, norm = vars(CppVecOverrides)["exp"], torch.layer_norm
    replaced = []
    for owner, name, value in (
        (CppVecOverrides, "exp", staticmethod(_plainly(exp.__func__, 2.0))),
        (torch, "layer_norm", functools.wraps(norm)(_plainly(norm, 2.0))),
        (F, "relu", F.silu),  # of torch: it has an identity
    ):
        with put(owner, name, value):
            replaced.append(codes())
    before = key_of()
    for module in _LATE:
        importlib.import_module(f"torch.{module}")
    torch.compile(lambda x: torch.vmap(torch.sin)(x) + 1)(torch.ones(2, 2, requires_grad=True))
    for mode, dynamic in (("default", True), ("max-autotune-no-cudagraphs", False)):
        compiled = torch.compile(_busy, mode=mode, dynamic=dynamic)
        compiled(torch.ones(2, 3, 9, 9, requires_grad=True)).backward()
    return [replaced, before, key_of(), [each.place for each in all_overrides()]]


def _busy(x: torch.Tensor) -> torch.Tensor:
    y = F.dropout(F.conv2d(x, torch.ones(3, 3, 3, 3)), 0.5)
    return y.std() + x.sort()[0].sum() + x.cumsum(0).mean() + (x.flatten(1) @ x.flatten(1).T).sum()


_WAYS = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"), ("S3CACHE_URL", "memory://x")


@nightly
@pytest.mark.timeout(900)
def test_keys_do_not_depend_on_when_s3cache_first_reads_torch(tmp_path: Path) -> None:
    """Nor on later imports and compiles. Without the entry point, s3cache reads torch later."""
    for name, value in (("S3CACHE_URL", ""), *_WAYS):
        machine = Machine(tmp_path / name / value[:1], **({name: value} if value else {}))
        replaced, before, after, others = machine.run(f"{__name__}:_codes_and_keys").result
        assert (replaced, others) == ([["generator"], ["override"], []], [])
        assert before == after is not None
