"""What stands in the modules of torch that make code, and is not torch's, is in the key."""

from __future__ import annotations

import functools
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
from torch._inductor import ir, lowering, scheduler
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
from torch._inductor.fx_passes import post_grad
from torch._prims_common import wrappers
from torch.fx.experimental import proxy_tensor

import s3cache
from s3cache.graph._members import replaced_members
from s3cache.torch_api import installed_release
from tests.support.density import dense
from tests.support.machines import Machine


def keys() -> list[str | None]:
    report = s3cache.check(torch.compile(lambda x: x.sin() + 1), torch.ones(4, 4))
    return [graph.key for graph in report.graphs]


def _scaled(original: Any, by: float, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs), by


def _plainly(original: Any, by: float) -> Any:
    return lambda *args, **kwargs: _scaled(original, by, *args, **kwargs)


def _wrapping(original: Any, by: float) -> Any:
    return functools.wraps(original)(_plainly(original, by))


class _Callable:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, *args: Any) -> Any:
        return args, self.by


_MORE: list[tuple[Any, str, Callable[[Any, float], Any]]] = [
    (post_grad, "remove_noop_ops", _plainly),
    (post_grad, "remove_noop_ops", lambda old, by: functools.partial(_scaled, old, by)),
    (post_grad, "remove_noop_ops", lambda _, by: _Callable(by)),
    (post_grad, "remove_noop_ops", lambda old, by: functools.cache(_plainly(old, by))),
    (post_grad, "remove_noop_ops", lambda old, by: torch.no_grad()(_plainly(old, by))),
    (proxy_tensor, "proxy_call", _plainly),
    (wrappers, "_resize_output_check", _plainly),
    (scheduler.Scheduler, "can_fuse", _plainly),
    (ir.Pointwise, "create", lambda old, by: classmethod(_plainly(old.__func__, by))),
    (ir.Buffer, "dtype", lambda old, by: property(_plainly(old.fget, by))),
]


@pytest.mark.parametrize(
    ("owner", "name", "make"),
    [
        (post_grad, "remove_noop_ops", _wrapping),
        (CppVecOverrides, "exp", lambda old, by: staticmethod(_plainly(old, by))),
        (ir, "Pointwise", lambda old, by: type("Pointwise", (old,), {"by": by})),
        *(pytest.param(*each, marks=dense) for each in _MORE),
    ],
)
def test_what_stands_there_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, make: Callable[[Any, float], Any]
) -> None:
    """Alike if the same stands there, and as before once torch's own is back."""
    there = inspect.getattr_static(owner, name)
    plain = keys()
    found = []
    for by in (2.0, 3.0, 2.0):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, make(there, by))
            found.append(tuple(keys()))
    assert found[0] == found[2] != found[1]
    assert len({tuple(plain), (None,), *found}) == 4
    assert keys() == plain


def test_what_cannot_be_followed_is_a_reason_that_names_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("mine")
    vars(module).update({name: each for name, each in vars(ir).items() if name[0] != "_"})
    for owner, name, double in (
        (post_grad, "remove_noop_ops", Mock()),
        (post_grad, "remove_noop_ops", lambda *_: input()),
        (lowering, "ir", module),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, double)
            (graph,) = s3cache.check(torch.compile(lambda x: x.sin() + 1), torch.ones(4, 4)).graphs
        (reason,) = graph.reasons
        assert reason.code == "override"
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
def test_torchs_own_in_anothers_place_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, other: Any
) -> None:
    plain = keys()
    there = inspect.getattr_static(owner, name)
    monkeypatch.setattr(owner, name, other)
    assert keys()[0] not in (*plain, None)
    monkeypatch.setattr(owner, name, there)
    assert keys() == plain


def test_what_torch_makes_anew_of_its_own_is_not_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps Dynamo out of some, and others it only takes apart and puts together again."""
    plain = keys()
    monkeypatch.setattr(
        post_grad, "remove_noop_ops", torch.compiler.disable(post_grad.remove_noop_ops)
    )
    monkeypatch.setattr(post_grad, "s3cache_number", 7, raising=False)
    assert keys() == plain


def test_code_that_is_put_into_torchs_own_function_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which leaves every name with the object that it had."""
    plain = keys()
    found = []
    for function in (post_grad.remove_noop_ops, vars(CppVecOverrides)["exp"].__func__):
        for by in (2.0, 3.0, 2.0):
            mine = eval(f"lambda *args, by={by}: (args, {by})")
            with monkeypatch.context() as patched:
                patched.setattr(function, "__code__", mine.__code__)
                found.append(tuple(keys()))
    assert found[0] == found[2] != found[1]
    assert found[3] == found[5] != found[4]
    assert len({tuple(plain), (None,), *found}) == 6
    assert keys() == plain


def test_defaults_of_torchs_functions_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    if installed_release() < (2, 12):
        pytest.skip("the graph is bypassed")
    plain = keys()
    found = []
    for value in ((lambda *_: False, 2), (lambda *_: False, 3), (lambda *_: False, 2)):
        with monkeypatch.context() as patched:
            patched.setattr(post_grad.register_lowering_pattern, "__defaults__", value)
            found.append(tuple(keys()))
    assert found[0] == found[2] != found[1]
    assert len({tuple(plain), (None,), *found}) == 4
    assert keys() == plain


def test_closures_of_torchs_functions_are_in_the_key() -> None:
    """A decorated function of a module that no program comes by itself."""
    plain = keys()
    closed = [
        each
        for each in vars(proxy_tensor).values()
        if type(each) is types.FunctionType and each.__closure__ and each.__module__[:5] == "torch"
    ]
    (cell, *_) = closed[0].__closure__ or ()
    found = []
    old = cell.cell_contents
    for by in (2.0, 3.0, 2.0):
        cell.cell_contents = _plainly(old, by)
        try:
            found.append(tuple(keys()))
        finally:
            cell.cell_contents = old
    assert found[0] == found[2] != found[1]
    assert len({tuple(plain), (None,), *found}) == 4
    assert keys() == plain


class _Alike(_Callable):
    """Says that it equals anything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("owner", "name"), [(post_grad, "remove_noop_ops"), (torch.nn.functional, "gelu")]
)
def test_what_stands_there_is_not_asked_whether_it_is_alike(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    plain = keys()
    monkeypatch.setattr(owner, name, _Alike(2.0))
    assert keys() != plain


def test_a_module_in_the_place_of_torchs_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch imports from it as it works."""
    plain = keys()
    other = types.ModuleType(post_grad.__name__)
    vars(other).update(vars(post_grad), remove_noop_ops=_plainly(post_grad.remove_noop_ops, 2.0))
    monkeypatch.setitem(sys.modules, post_grad.__name__, other)
    (graph,) = s3cache.check(torch.compile(lambda x: x.sin() + 1), torch.ones(4, 4)).graphs
    (reason,) = graph.reasons
    assert "torch._inductor.fx_passes.post_grad was replaced" in reason.message
    monkeypatch.setitem(sys.modules, post_grad.__name__, post_grad)
    assert keys() == plain


def test_seams_are_not_in_the_key(tmp_path: Path) -> None:
    plain = keys()
    with s3cache.enabled(local_dir=tmp_path):
        assert keys() == plain
        assert replaced_members() == []


def _keys_of_machine() -> list[Any]:
    """With something in place from before anybody looked, then without; whose all the rest is."""
    exp: Any = vars(CppVecOverrides)["exp"]
    CppVecOverrides.exp = staticmethod(_plainly(exp.__func__, 2.0))  # type: ignore[method-assign]
    replaced = keys()
    CppVecOverrides.exp = exp  # type: ignore[method-assign]
    import torch.distributed.tensor
    import torch.nn.attention.flex_attention

    torch.compile(lambda x: torch.vmap(torch.sin)(x) + 1)(torch.ones(2, 2, requires_grad=True))
    return [replaced, keys(), [place for place, _ in replaced_members()]]


@dense
@pytest.mark.timeout(900)
def test_it_does_not_matter_when_torch_was_first_looked_at(tmp_path: Path) -> None:
    """Nor what was imported since: in a process all of torch's is taken for torch's."""
    ways = {"early": {}, "late": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}
    early, late = (
        Machine(tmp_path / name, **environment).run(f"{__name__}:_keys_of_machine").result
        for name, environment in ways.items()
    )
    assert early == late
    replaced, plain, others = early
    assert len({*replaced, *plain, None}) == 3
    assert others == []
