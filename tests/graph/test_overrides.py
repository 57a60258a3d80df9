"""What a program has replaced of torch is in its keys; what torch made is not."""

from __future__ import annotations

import functools
import importlib
import itertools
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._decomp
import torch._refs
import torch.nn.functional as F  # noqa: N812 - as everybody does
from torch import Tensor

import s3cache
from s3cache.graph._altered import remember_insides
from s3cache.graph._code import UntoldError
from s3cache.graph._registered import forget_kernels, replaced_kernels
from s3cache.graph._whose import text_of
from s3cache.torch_api import installed_release
from tests.support.density import dense
from tests.support.machines import Machine


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,)) + x.softmax(-1)


def keys() -> list[str | None]:
    report = s3cache.check(torch.compile(_normed), torch.ones(4, 4))
    return [graph.key for graph in report.graphs]


def _doubled(original: Callable[..., Any], by: float) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * by

    return wrapper


def test_what_torch_calls_below_a_graph_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = keys()
    found = []
    for owner, name in ((torch, "layer_norm"), (torch.Tensor, "softmax"), (torch._VF, "dropout")):
        for by in (2.0, 2.0, 3.0):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, _doubled(getattr(owner, name), by))
                found += keys()
    assert found[0::3] == found[1::3]
    assert len({plain, None, *found}) == 8
    assert keys() == [plain]


def test_torchs_own_in_another_place_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = keys()
    monkeypatch.setattr(torch.Tensor, "softmax", torch.Tensor.log_softmax)
    (other,) = keys()
    assert other not in (plain, None)


def test_what_torch_does_not_look_at_is_not_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys()
    ticks = itertools.count()
    monkeypatch.setattr(torch, "s3cache_mine", lambda: next(ticks), raising=False)
    monkeypatch.setattr(torch, "load", lambda *_: time.time())
    monkeypatch.setattr(torch, "layer_norm", torch.layer_norm)
    assert keys() == before


def test_what_cannot_be_followed_is_a_reason_and_can_be_vouched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "layer_norm", _timed)
    (graph,) = s3cache.check(torch.compile(_normed), torch.ones(4, 4)).graphs
    (reason,) = graph.reasons
    assert reason.code == "override"
    assert "torch.layer_norm" in reason.message
    assert "put torch's own back" in reason.fix
    exec(reason.fix)  # as users do who paste it
    assert keys() != [None]


def _timed(*args: Any) -> Any:
    norm: Any = torch.native_layer_norm
    return norm(*args[:4], 1e-5)[0] * time.time()


def _keys_of_machine() -> list[list[str | None]]:
    """Replaced before anybody has had a look at torch, and put back."""
    original, relu = torch.layer_norm, F.relu
    torch.layer_norm = _doubled(original, 2.0)
    replaced = keys()
    torch.layer_norm = original
    F.relu = F.silu
    swapped = keys()
    F.relu = relu
    return [replaced, swapped, keys()]


@dense
@pytest.mark.timeout(900)
def test_keys_are_the_same_however_early_torch_was_seen(tmp_path: Path) -> None:
    """Without the entry point torch is seen late: by itself it says as little, changed as much."""
    environments = {"early": {}, "late": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}
    early, late = (
        Machine(tmp_path / name, **environment).run(f"{__name__}:_keys_of_machine").result
        for name, environment in environments.items()
    )
    assert early == late
    assert len({key for (key,) in early}) == 3
    assert [None] not in early


# -- what is inside of functions and operators


def _other_code(x: Tensor, inplace: bool = False) -> Tensor:
    return x * 5


def _another_code(x: Tensor, inplace: bool = False) -> Tensor:
    return x * 6


def _under_torchs_name(code: types.CodeType) -> types.CodeType:
    old = F.relu.__code__
    return code.replace(co_filename=old.co_filename, co_name=old.co_name)


@pytest.mark.parametrize(
    ("attribute", "ways"),
    [
        ("__code__", [_other_code.__code__, _another_code.__code__, F.silu.__code__]),
        ("__code__", [_under_torchs_name(_other_code.__code__), F.relu6.__code__]),
        ("__defaults__", [(True,), (1,), (0,)]),
        ("__kwdefaults__", [{"inplace": True}, {"inplace": 1}]),
    ],
)
def test_what_a_function_of_torchs_is_made_of_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, attribute: str, ways: list[Any]
) -> None:
    """Alike if it is altered alike, and as before once it is put back."""
    plain = keys()
    found = []
    for way in (*ways, *ways):
        with monkeypatch.context() as patched:
            patched.setattr(F.relu, attribute, way)
            found.append(tuple(keys()))
    assert found[: len(ways)] == found[len(ways) :]
    assert len({tuple(plain), (None,), *found}) == len(ways) + 2
    assert keys() == plain


def _formula(name: str) -> Any:
    function = torch._decomp.decomposition_table[getattr(torch.ops.aten, name).default]
    assert isinstance(function, types.FunctionType)
    return function


def _tripled(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * 3


def test_what_a_wrapper_of_torchs_wraps_is_in_the_key() -> None:
    """And which of the many that one decorator made."""
    plain = keys()
    found = []
    for name in ("mish", "elu", "mish"):
        formula = _formula(name)
        (cell,) = formula.__closure__
        old = cell.cell_contents
        cell.cell_contents = _tripled
        found += keys()
        cell.cell_contents = old
    assert found[0] == found[2]
    assert len({*plain, None, *found}) == 4
    assert keys() == plain


def test_what_torch_keeps_in_a_closure_is_not_in_the_key() -> None:
    """A variable to which a function assigns changes while it works."""

    def make() -> tuple[Callable[[], None], Callable[[], int]]:
        count = 0

        def add() -> None:
            nonlocal count
            count += 1

        return add, lambda: count

    add, read = make()
    remember_insides([read])
    before = keys()
    add()
    assert read() == 1
    assert keys() == before


_SILU = torch.ops.aten.silu.default
_KEY = torch._C.DispatchKey.AutogradCPU


def _given(function: Any) -> None:
    _SILU.py_impl(_KEY)(function)


def _written(function: Any) -> None:
    _SILU.py_kernels[_KEY] = function


@pytest.mark.parametrize("put", [_given, _written])
def test_tables_of_operators_are_in_the_key(put: Callable[[Any], None], tmp_path: Path) -> None:
    """Torch's own functions, too, where somebody else puts them."""
    with s3cache.enabled(local_dir=tmp_path):
        plain = keys()
        found = []
        for function in (_tripled, torch._refs.cos, torch._refs.sinc, _tripled):
            put(function)
            found += keys()
            del _SILU.py_kernels[_KEY]
        assert found[0] == found[3]
        assert len({*plain, None, *found}) == 5
        assert keys() == plain


def _no_operator(x: Tensor) -> Tensor:
    return x * 3


@pytest.mark.parametrize(
    ("owner", "name", "others"),
    [
        (torch.ops.aten.silu, "default", [torch.ops.aten.relu.default, _no_operator, None]),
        (torch.ops.aten, "silu", [torch.ops.aten.relu, _no_operator, None]),
        (torch.ops, "prims", [torch.ops.aten, torch.ops.quantized]),
    ],
)
def test_what_is_in_the_place_of_an_operator_is_in_the_key(
    owner: Any, name: str, others: list[Any]
) -> None:
    """A decomposition asks for it there; ``None`` is nothing: torch would make it anew."""
    if name == "prims" and installed_release() >= (2, 15):
        pytest.skip("this torch cannot trace a normalization with another namespace there")
    plain = keys()
    old = getattr(owner, name)
    found = []
    for value in (*others, *others):
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
        try:
            found.append(tuple(keys()))
        finally:
            setattr(owner, name, old)
    assert found[: len(others)] == found[len(others) :]
    assert len({tuple(plain), (None,), *found}) == len(others) + 2
    assert keys() == plain


def test_operators_of_the_users_may_come_and_go() -> None:
    plain = keys()
    for factor in (2, 3):
        library = torch.library.Library("s3cache_overrides", "FRAGMENT")
        library.define("passing(Tensor x) -> Tensor")
        library.impl("passing", lambda x, by=factor: x * by, "CompositeImplicitAutograd")
        assert torch.ops.s3cache_overrides.passing.default(torch.ones(1)) == factor
        assert keys() == plain
        library._destroy()
        assert keys() == plain
    delattr(torch.ops, "s3cache_overrides")
    assert keys() == plain


def test_kernels_of_each_namespace_of_torchs_are_in_the_key(tmp_path: Path) -> None:
    with s3cache.enabled(local_dir=tmp_path):
        plain = keys()
        found = []
        for name in ("prims::sin", "aten::silu", "quantized::add_relu"):
            for function in (_tripled, torch._refs.cos):
                library = torch.library.Library(name.partition("::")[0], "IMPL")
                library.impl(name.partition("::")[2], function, "AutogradCPU")
                found += keys()
                library._destroy()
        assert len({*plain, None, *found}) == 8
        assert keys() == plain


def test_kernels_of_others_operators_are_in_no_key_but_theirs(tmp_path: Path) -> None:
    with s3cache.enabled(local_dir=tmp_path):
        plain = keys()
        library = torch.library.Library("s3cache_overrides", "FRAGMENT")
        library.define("mine(Tensor x) -> Tensor")
        library.impl("mine", _tripled, "CompositeImplicitAutograd")
        torch.ops.s3cache_overrides.mine.default.py_impl(_KEY)(_tripled)
        assert keys() == plain
        library._destroy()


def _keys_after_much_of_torch(late: bool) -> list[str | None]:
    """What torch registers for itself, while it is imported and works, is no alteration."""
    import torch.distributed.tensor
    import torch.export
    import torch.nn.attention.flex_attention
    import torch.onnx

    if late:
        importlib.import_module("torch.ao.quantization.fx._decomposed")
        importlib.import_module("torch.distributed._symmetric_memory")
        torch.compile(lambda x: torch.vmap(torch.sin)(x) + 1)(torch.ones(2, 2))
    found = keys()
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    importlib.import_module("torch.distributed._symmetric_memory")
    return [*found, *keys()]


@dense
@pytest.mark.timeout(900)
def test_what_torch_does_by_itself_alters_nothing(tmp_path: Path) -> None:
    script = f"{__name__}:_keys_after_much_of_torch"
    found = [
        Machine(tmp_path / f"{late}{url}", **({"S3CACHE_URL": "memory://x"} if url else {}))
        .run(script, late)
        .result
        for late in (False, True)
        for url in (False, True)
    ]
    assert len({key for each in found for key in each}) == 1
    assert found[0] == [found[0][0]] * 2
    assert found[0][0] is not None


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("key", ["Autograd", "AutogradCPU", "CPU"])
def test_kernels_are_seen_that_are_registered_while_nobody_looks(key: str) -> None:
    """Where another one was seen before: what is read of an operator is read again."""
    forget_kernels()
    for each in ("CompositeImplicitAutograd", key):
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("celu", lambda x, alpha=1.0: torch.sin(x), each)
            assert replaced_kernels().get(f"aten/celu/{each}", "unseen") is None
        finally:
            library._destroy()
        assert f"aten/celu/{each}" not in replaced_kernels()


@pytest.mark.parametrize("kind", ["holds itself", "too much in it"])
def test_what_torchs_function_was_given_is_read_within_a_bound(kind: str) -> None:
    given: list[Any] = [1.0]
    if kind == "holds itself":
        given.append(given)
    for _ in range(0 if kind == "holds itself" else 60):
        given = [given, given]
    function = types.FunctionType(F.dropout.__code__, F.dropout.__globals__, "dropout", (given,))
    assert text_of(F.dropout)
    with pytest.raises(UntoldError, match="refers to too much"):
        text_of(function)
