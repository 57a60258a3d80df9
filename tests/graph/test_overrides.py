"""What a program has replaced of torch keeps graphs from the first level."""

from __future__ import annotations

import functools
import importlib
import itertools
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._decomp
import torch._refs
import torch.nn.functional as F  # noqa: N812 - as everybody does
from torch import Tensor

import s3cache
from s3cache.graph._identity import UnidentifiedError, identity
from s3cache.graph._overrides import forget_kernels, overrides, replaced_kernels
from s3cache.torch_api import installed_release
from s3cache.util.snapshot import FUNCTIONS
from tests.support.machines import Machine
from tests.support.marks import slow


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,)) + x.softmax(-1)


def keys() -> list[str | None]:
    report = s3cache.check(torch.compile(_normed), torch.ones(4, 4))
    return [graph.key for graph in report.graphs]


def codes() -> list[str]:
    report = s3cache.check(torch.compile(_normed), torch.ones(4, 4))
    return [reason.code for graph in report.graphs for reason in graph.reasons]


def replaced() -> tuple[str, str]:
    """What keeps graphs from the first level, and what the key of the second one has of it."""
    component, unsafe = overrides(traced=True), overrides()
    assert isinstance(component, str)
    assert component
    assert isinstance(unsafe, list)
    return unsafe[0].code, component


def _doubled(original: Callable[..., Any], by: float) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * by

    return wrapper


def test_what_torch_calls_below_a_graph_keeps_it_from_the_first_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second level's key has the file that it is from, and no state."""
    plain = keys()
    found = []
    for owner, name in ((torch, "layer_norm"), (torch.Tensor, "softmax"), (torch._VF, "dropout")):
        for by in (2.0, 3.0):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, _doubled(getattr(owner, name), by))
                assert codes() == ["override"]
                found.append(replaced())
    assert found[0::2] == found[1::2]
    assert len(set(found)) == 3
    assert keys() == plain


def test_a_library_that_replaces_functions_leaves_the_second_level(
    install: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tensordict and torch_geometric do where they are imported."""
    library = install(
        "import functools\ndef wrapped(f):\n    @functools.wraps(f)\n"
        "    def inner(*args, **kwargs): return f(*args, **kwargs)\n    return inner"
    )
    import torch._functorch.vmap as vmap

    for owner, name in ((torch, "stack"), (torch, "cat"), (vmap, "_add_batch_dim")):
        monkeypatch.setattr(owner, name, library.wrapped(getattr(owner, name)))
    (graph,) = s3cache.check(torch.compile(_normed), torch.ones(4, 4)).graphs
    assert {reason.code for reason in graph.reasons} == {"override"}
    assert graph.in_halves
    assert replaced()[0] == "override"


def test_so_does_torchs_own_in_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "softmax", torch.Tensor.log_softmax)
    assert codes() == ["override"]


def test_what_torch_does_not_look_at_is_not_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys()
    ticks = itertools.count()
    monkeypatch.setattr(torch, "s3cache_mine", lambda: next(ticks), raising=False)
    monkeypatch.setattr(torch, "load", lambda *_: time.time())
    monkeypatch.setattr(torch, "layer_norm", torch.layer_norm)
    assert keys() == before


def test_a_replacement_that_is_registered_is_in_the_key_of_the_first_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "layer_norm", _timed)
    (graph,) = s3cache.check(torch.compile(_normed), torch.ones(4, 4)).graphs
    (reason,) = graph.reasons
    assert reason.code == "override"
    assert "torch.layer_norm" in reason.message
    assert "put torch's own back" in reason.fix
    assert not reason.blocks_fx_level
    exec(reason.fix)  # as users do who paste it
    assert keys() != [None]


def _timed(*args: Any) -> Any:
    norm: Any = torch.native_layer_norm
    return norm(*args[:4], 1e-5)[0] * time.time()


def _codes_of_machine() -> list[list[str]]:
    """Replaced before anybody has had a look at torch, and put back."""
    original, relu = torch.layer_norm, F.relu
    torch.layer_norm = _doubled(original, 2.0)
    replaced = codes()
    torch.layer_norm = original
    F.relu = F.silu
    swapped = codes()
    F.relu = relu
    return [replaced, swapped, codes()]


@slow
@pytest.mark.timeout(900)
def test_it_does_not_matter_how_early_torch_was_seen(tmp_path: Path) -> None:
    """Without the entry point torch is seen late: by itself it says as little, changed as much."""
    environments = {"early": {}, "late": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}
    early, late = (
        Machine(tmp_path / name, **environment).run(f"{__name__}:_codes_of_machine").result
        for name, environment in environments.items()
    )
    assert early == late == [["override"], ["override"], []]


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
    ],
)
def test_so_does_a_function_of_torchs_that_is_altered(
    monkeypatch: pytest.MonkeyPatch, attribute: str, ways: list[Any]
) -> None:
    """And it is as before once it is put back."""
    plain = keys()
    for way in ways:
        with monkeypatch.context() as patched:
            patched.setattr(F.relu, attribute, way)
            assert codes() == ["override"]
    assert keys() == plain


def _formula(name: str) -> Any:
    function = torch._decomp.decomposition_table[getattr(torch.ops.aten, name).default]
    assert isinstance(function, types.FunctionType)
    return function


def _tripled(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * 3


def test_so_does_what_a_wrapper_of_torchs_wraps() -> None:
    """And which of the many that one decorator made."""
    plain = keys()
    found = []
    for name in ("mish", "elu", "mish"):
        formula = _formula(name)
        (cell,) = formula.__closure__
        old = cell.cell_contents
        cell.cell_contents = _tripled
        found.append(replaced())
        cell.cell_contents = old
    assert found[0] == found[2] != found[1]
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
    FUNCTIONS.add([read])
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
def test_so_does_what_is_put_into_tables_of_operators(
    put: Callable[[Any], None], tmp_path: Path
) -> None:
    with s3cache.enabled(local_dir=tmp_path):
        plain = keys()
        put(_tripled)
        try:
            assert codes() == ["override"]
        finally:
            del _SILU.py_kernels[_KEY]
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
def test_so_does_what_is_in_the_place_of_an_operator(
    owner: Any, name: str, others: list[Any]
) -> None:
    """A decomposition asks for it there; ``None`` is nothing: torch would make it anew."""
    if name == "prims" and installed_release() >= (2, 15):
        pytest.skip("this torch cannot trace a normalization with another namespace there")
    plain = keys()
    old = getattr(owner, name)
    for value in others:
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
        try:
            assert set(codes()) == {"override"}
        finally:
            setattr(owner, name, old)
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


def test_so_do_kernels_for_operators_in_each_namespace_of_torchs(tmp_path: Path) -> None:
    with s3cache.enabled(local_dir=tmp_path):
        plain = keys()
        for name in ("prims::sin", "aten::silu", "quantized::add_relu"):
            for function in (_tripled, torch._refs.cos):
                library = torch.library.Library(name.partition("::")[0], "IMPL")
                library.impl(name.partition("::")[2], function, "AutogradCPU")
                assert codes() == ["override"]
                library._destroy()
        assert keys() == plain


def test_what_python_keeps_in_a_class_that_was_copied_is_in_no_key() -> None:
    """``copyreg`` keeps the names of slots there, the first time."""
    plain = keys()
    for kind in (Tensor, torch.nn.Parameter):
        with patch.object(kind, "__slotnames__", [], create=True):
            assert keys() == plain


def test_so_do_rules_for_operators_that_torch_defines_in_python(tmp_path: Path) -> None:
    """torch keeps such a formula with the definition; a library's is as good as a program's."""
    with s3cache.enabled(local_dir=tmp_path):
        plain = keys()
        definition = torch._library.custom_ops.OPDEFS["prims::fma"]
        with patch.dict(vars(definition)):
            definition.register_autograd(lambda ctx, grad: grad)
            assert codes() == ["override"]
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


@slow
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
            assert replaced_kernels().get(f"aten/celu/{each}") == __file__
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
    assert identity(F.dropout)
    with pytest.raises(UnidentifiedError, match="refers to too much"):
        identity(function)
