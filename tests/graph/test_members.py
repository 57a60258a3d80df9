"""The key has every object in torch's code generators that is not torch's own."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch._inductor import ir, lowering, scheduler
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
from torch._inductor.fx_passes import post_grad
from torch._prims_common import wrappers
from torch.fx.experimental import proxy_tensor

import s3cache
from s3cache.graph._overrides import all_overrides
from tests.graph.checking import checked, codes, key_of
from tests.support.machines import Machine
from tests.support.marks import nightly, slow

_LIBRARY = """
import functools
def scaled(original, by, *args, **kwargs): return original(*args, **kwargs), by
def plainly(original, by): return lambda *args, **kwargs: scaled(original, by, *args, **kwargs)
def wrapping(original, by): return functools.wraps(original)(plainly(original, by))
class Callable:
    def __init__(self, by): self.by = by
    def __call__(self, *args): return args, self.by
"""


@pytest.fixture
def library(install: Callable[[str], Any]) -> Any:
    return install(_LIBRARY)


def _plainly(original: Any, by: float) -> Any:
    return lambda *args, **kwargs: (original(*args, **kwargs), by)


Make = Callable[[Any, Any, float], Any]
_MORE: list[tuple[Any, str, Make]] = [
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
        (CppVecOverrides, "exp", lambda of, old, by: staticmethod(of.plainly(old.__func__, by))),
        *(pytest.param(*each, marks=slow) for each in _MORE),
    ],
)
def test_a_replacement_by_a_library_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, library: Any, owner: Any, name: str, make: Make
) -> None:
    """The same object gives the same key; the old key returns with torch's own object."""
    there = inspect.getattr_static(owner, name)
    plain = key_of()
    found = []
    for by in (2.0, 3.0, 2.0):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, make(library, there, by))
            found.append(key_of())
    assert found[0] == found[2] != found[1]
    assert len({plain, None, *found}) == 4
    assert key_of() == plain


def test_the_reason_for_an_unidentified_replacement_names_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("mine")
    vars(module).update({name: each for name, each in vars(ir).items() if name[0] != "_"})
    for owner, name, double in (
        (post_grad, "remove_noop_ops", Mock()),
        (post_grad, "remove_noop_ops", lambda *_: None),
        (ir, "Pointwise", type("Pointwise", (ir.Pointwise,), {})),
        (lowering, "ir", module),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, double)
            (reason,) = checked().reasons
        assert reason.code == "generator"
        assert reason.blocks_fx_level
        assert f"{owner.__name__}.{name}" in reason.message


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (post_grad, "remove_noop_ops", post_grad.remove_assert_ops),
        (CppVecOverrides, "exp", CppVecOverrides.log),
        (CppVecOverrides, "exp", vars(CppVecOverrides)["log"]),
        (CppVecOverrides, "sin", CppOverrides.sin),
        (ir, "Pointwise", ir.Reduction),
        (lowering, "ir", scheduler),
    ],
)
def test_an_object_of_torch_in_another_place_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, other: Any
) -> None:
    plain = key_of()
    there = inspect.getattr_static(owner, name)
    monkeypatch.setattr(owner, name, other)
    assert key_of() not in (plain, None)
    monkeypatch.setattr(owner, name, there)
    assert key_of() == plain


def test_torchs_own_wrappers_of_its_functions_are_not_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as the wrapper of ``torch.compiler.disable``; an added name does not matter either."""
    plain = key_of()
    monkeypatch.setattr(
        post_grad, "remove_noop_ops", torch.compiler.disable(post_grad.remove_noop_ops)
    )
    monkeypatch.setattr(post_grad, "s3cache_number", 7, raising=False)
    assert key_of() == plain


def test_functions_that_dynamo_adds_to_torchs_modules_are_in_no_key() -> None:
    """``torch.cond`` without ``torch.compile`` leaves a compiled function in its module."""
    plain = key_of()
    x = torch.ones(3)
    torch.cond(x.sum() > 1, lambda x: x + 1, lambda x: x - 1, (x,))
    module = sys.modules["torch._higher_order_ops.cond"]
    assert any(name.startswith("__compiled_fn_") for name in vars(module))
    assert key_of() == plain


def _closure() -> tuple[Any, str]:
    """Return a closure cell of a decorated function of torch, and the cell's attribute."""
    function = next(
        each
        for each in vars(proxy_tensor).values()
        if type(each) is types.FunctionType and each.__closure__ and each.__module__[:5] == "torch"
    )
    return (function.__closure__ or ())[0], "cell_contents"


@pytest.mark.parametrize(
    ("owner", "name", "code"),
    [
        (post_grad.remove_noop_ops, "__code__", "generator"),
        (vars(CppVecOverrides)["exp"].__func__, "__code__", "generator"),
        (post_grad.register_lowering_pattern, "__defaults__", "generator"),
        (*_closure(), "override"),
    ],
)
def test_a_change_inside_a_function_of_torch_has_no_identity(
    owner: Any, name: str, code: str
) -> None:
    """Every name keeps its object."""
    plain, old = key_of(), getattr(owner, name)
    others = {
        "__code__": (lambda *args: args).__code__,
        "__defaults__": (lambda *_: False, 2),
        "cell_contents": lambda *args: args,
    }
    setattr(owner, name, others[name])
    try:
        assert codes() == [code]
    finally:
        setattr(owner, name, old)
    assert key_of() == plain


class _Alike:
    """An object that claims to equal any other."""

    def __call__(self, *args: Any) -> Any:
        return args

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(("owner", "name"), [(post_grad, "remove_noop_ops"), (F, "gelu")])
def test_a_replacement_cannot_claim_to_equal_the_original(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    plain = key_of()
    monkeypatch.setattr(owner, name, _Alike())
    assert key_of() != plain


def test_a_replaced_module_of_torch_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports from the module while it compiles."""
    plain = key_of()
    other = types.ModuleType(post_grad.__name__)
    vars(other).update(vars(post_grad), remove_noop_ops=_plainly(post_grad.remove_noop_ops, 2.0))
    monkeypatch.setitem(sys.modules, post_grad.__name__, other)
    (reason,) = checked().reasons
    assert "torch._inductor.fx_passes.post_grad was replaced" in reason.message
    monkeypatch.setitem(sys.modules, post_grad.__name__, post_grad)
    assert key_of() == plain


def test_hooks_of_s3cache_are_not_in_the_key(tmp_path: Path) -> None:
    plain = key_of()
    with s3cache.enabled(local_dir=tmp_path):
        assert key_of() == plain
        assert all_overrides() == []


def _codes_and_key() -> list[Any]:
    """Return the codes with replaced functions, then the key and overrides without them."""
    exp, norm, relu = vars(CppVecOverrides)["exp"], torch.layer_norm, F.relu
    replaced = []
    for owner, name, value in (
        (CppVecOverrides, "exp", staticmethod(_plainly(exp.__func__, 2.0))),
        (torch, "layer_norm", functools.wraps(norm)(_plainly(norm, 2.0))),
        (F, "relu", F.silu),
    ):
        setattr(owner, name, value)
        replaced.append(codes())
        CppVecOverrides.exp, torch.layer_norm, F.relu = exp, norm, relu  # type: ignore[method-assign]
    for name in ("torch.distributed.tensor", "torch.nn.attention.flex_attention"):
        importlib.import_module(name)
    torch.compile(lambda x: torch.vmap(torch.sin)(x) + 1)(torch.ones(2, 2, requires_grad=True))
    return [replaced, key_of(), [each.place for each in all_overrides()]]


@nightly
@pytest.mark.timeout(900)
def test_keys_do_not_depend_on_when_s3cache_first_reads_torch(tmp_path: Path) -> None:
    """Later imports do not matter either. Without the entry point, s3cache reads torch later."""
    ways = {"early": {}, "late": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}
    early, late = (
        Machine(tmp_path / name, **environment).run(f"{__name__}:_codes_and_key").result
        for name, environment in ways.items()
    )
    for replaced, plain, others in (early, late):
        assert (replaced, others) == ([["generator"], ["override"], ["override"]], [])
        assert plain is not None
