"""If a program replaces a part of torch, graphs bypass the first level."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch._decomp
import torch._refs
import torch.nn.functional as F  # noqa: N812 - the usual name
import torch.package
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor import decomposition
from torch._inductor.codecache import FxGraphCache
from torch._subclasses import fake_impls

import s3cache
from s3cache.graph._describe import UnidentifiedError, identity
from s3cache.graph._overrides import overrides
from s3cache.graph._user_code import forget_kernels, replaced_kernels
from s3cache.torch_api import installed_release
from s3cache.util.snapshot import FUNCTIONS
from tests.graph import checking
from tests.graph.checking import put
from tests.support.marks import nightly, slow
from tests.support.scripts import run_script


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, (4,)) + x.softmax(-1)


key = functools.partial(checking.key_of, _normed)
codes = functools.partial(checking.codes, _normed)


def replaced() -> tuple[str, str]:
    """Return the bypass code of the first level, and the component in the second level's key."""
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


def test_a_replacement_that_torch_calls_below_a_graph_keeps_it_from_the_first_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second level's key has the file of the replacement, and no state."""
    plain = key()
    found = []
    for owner, name in ((torch, "layer_norm"), (torch.Tensor, "softmax"), (torch._VF, "dropout")):
        for by in (2.0, 3.0):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, _doubled(getattr(owner, name), by))
                assert codes() == ["override"]
                found.append(replaced())
    assert found[0::2] == found[1::2]
    assert len(set(found)) == 3
    assert key() == plain


def test_a_library_that_replaces_functions_does_not_block_the_second_level(
    install: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tensordict and torch_geometric do so when they are imported."""
    library = install(
        "import functools\ndef wrapped(f):\n    @functools.wraps(f)\n"
        "    def inner(*args, **kwargs): return f(*args, **kwargs)\n    return inner"
    )
    import torch._functorch.vmap as vmap

    for owner, name in ((torch, "stack"), (torch, "cat"), (vmap, "_add_batch_dim")):
        monkeypatch.setattr(owner, name, library.wrapped(getattr(owner, name)))
    graph = checking.checked(_normed)
    (reason,) = graph.reasons  # for three functions that a user cannot register
    assert reason.code == "override"
    assert reason.target == f"{library.__name__} 1.0"
    assert "torch.cat, torch.stack" in reason.message
    assert not reason.fix
    assert graph.in_halves
    assert replaced()[0] == "override"


def test_a_registered_replacement_is_in_the_key_of_the_first_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "layer_norm", _timed)
    (reason,) = checking.checked(_normed).reasons
    assert reason.code == "override"
    assert "torch.layer_norm" in reason.message
    assert "put torch's own back" in reason.fix
    assert not reason.blocks_fx_level
    exec(reason.fix)  # as if a user had pasted it
    assert key() is not None


def _timed(*args: Any) -> Any:
    norm: Any = torch.native_layer_norm
    return norm(*args[:4], 1e-5)[0] * time.time()


# -- alterations: of a name, inside a function, of operators


def _other_code(x: Tensor, inplace: bool = False) -> Tensor:
    return x * 5


def _another_code(x: Tensor, inplace: bool = False) -> Tensor:
    return x * 6


def _tripled(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * 3


def _under_torchs_name(code: types.CodeType) -> types.CodeType:
    old = F.relu.__code__
    return code.replace(co_filename=old.co_filename, co_name=old.co_name)


_SILU = torch.ops.aten.silu.default
_KEY = torch._C.DispatchKey.AutogradCPU


@contextlib.contextmanager
def _rule(how: str) -> Iterator[None]:
    with patch.dict(_SILU.py_kernels):
        if how == "given":
            _SILU.py_impl(_KEY)(_tripled)
        else:
            _SILU.py_kernels[_KEY] = _tripled
        yield


@contextlib.contextmanager
def _kernel(name: str, function: Any) -> Iterator[None]:
    namespace, _, operator = name.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    library.impl(operator, function, "AutogradCPU")
    yield
    library._destroy()


@contextlib.contextmanager
def _formula() -> Iterator[None]:
    """Register a backward formula, which torch keeps with the operator's definition."""
    definition = torch._library.custom_ops.OPDEFS["prims::fma"]
    with patch.dict(vars(definition)):
        definition.register_autograd(lambda ctx, grad: grad)
        yield


def test_parts_of_torch_in_other_places_are_in_the_key_of_the_first_level(tmp_path: Path) -> None:
    """Nothing, constants, and torch's own functions and operators have an identity."""
    operators, rules = torch.ops.aten, fake_impls.op_implementations_dict
    changes: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
        lambda: put(torch.Tensor, "softmax", torch.Tensor.log_softmax),
        lambda: put(torch, "relu", torch.sigmoid),
        lambda: put(torch, "Storage", torch.DoubleStorage),  # as another default dtype does
        lambda: put(operators.silu, "default", operators.relu.default),
        lambda: put(operators.silu, "default"),
        lambda: put(operators, "silu", operators.relu),
        lambda: patch.dict(rules, {operators.nonzero.default: rules[operators.item.default]}),
    ]
    with s3cache.enabled(local_dir=tmp_path):
        plain = key()
        found = []
        for change in changes:
            with change():
                found.append(key())
            assert key() == plain
    assert None not in found
    assert len({plain, *found}) == 1 + len(changes)


def _export(_: Path) -> None:
    class Linear(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.silu(super().forward(x))

    torch.export.export(Linear(4, 4), (torch.ones(2, 4),)).run_decompositions()


def _package(path: Path) -> None:
    with torch.package.PackageExporter(path / "package.pt") as exporter:  # type: ignore[attr-defined]
        exporter.save_pickle("model", "model.pkl", {"weight": torch.ones(2)})


def _package_with_inductor(path: Path) -> None:
    exported = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    package = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(path / "inductor.pt2"),
        # torch writes into the default if an earlier test has changed options.
        inductor_configs={"aot_inductor.metadata": {}},
    )
    torch._inductor.aoti_load_package(package)(torch.ones(2, 4))


def _compiled(path: Path) -> int:
    """Compile a program on a cache; return the hits at the first level."""
    torch._dynamo.reset()
    FxGraphCache.clear()
    with (
        s3cache.enabled(local_dir=path / "cache") as cache,
        inductor.patch(fallback_by_default=True),
    ):
        torch.compile(_normed)(torch.ones(4, 4))
        torch._dynamo.reset()
        return sum(cache.stats().hits.values())


_STEPS = _package, _export, _compiled
_OTHER_ORDERS = [order for order in itertools.permutations(_STEPS) if order != _STEPS]
_ORDERS = [
    _STEPS,
    pytest.param(_STEPS[::-1], marks=slow),
    pytest.param((_compiled, _export, _package_with_inductor, _compiled), marks=slow),
    *(pytest.param(order, marks=nightly) for order in _OTHER_ORDERS),
]


@pytest.mark.parametrize("order", _ORDERS, ids=lambda order: "".join(f.__name__ for f in order))
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_changes_to_torch_move_no_key(
    order: tuple[Callable[[Path], object], ...], tmp_path: Path
) -> None:
    """Exporting, packaging and compiling, in every order: torch removes rules that it never reads.

    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/export/exported_program.py#L272
    """
    assert _compiled(tmp_path) == 0
    rules = fake_impls.op_implementations_dict
    before = dict(rules)
    with patch.dict(rules):
        for step in order:
            assert step(tmp_path) == (1 if step is _compiled else None)
        assert rules != before
        assert _compiled(tmp_path) == 1


_REPLACED_EARLY = """
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
torch.layer_norm = lambda *_: None
from s3cache.graph._overrides import overrides
first, torch.s3cache_mine = overrides(), 1
print(*(f"{each.code}:{each.target}" for each in (*first, *overrides())))
"""


def test_a_replacement_from_before_the_first_look_is_not_forgotten() -> None:
    """Without a copy from the end of ``import torch``, and if its namespace changes later."""
    assert run_script(_REPLACED_EARLY).stdout.split() == ["override:torch.layer_norm"] * 2


_CODES = [each.__code__ for each in (_other_code, _another_code, F.silu, F.relu6)]
# Decompositions look up operators here. torch would create a missing one again.
_PLACES: list[tuple[Any, str, list[Any]]] = [
    (torch.ops.aten.silu, "default", [_tripled]),
    (torch.ops.aten, "silu", [_tripled]),
]
if installed_release() < (2, 15):  # 2.15 cannot trace a normalization with these
    _PLACES.append((torch.ops, "prims", [torch.ops.aten, torch.ops.quantized]))
ALTERED: dict[str, list[Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "names": [
        lambda: put(torch, "finfo", type("finfo", (), {})),
        lambda: put(torch, "finfo", np.finfo),
        lambda: put(F, "hardtanh", torch._refs.nn.functional.hardtanh),  # of torch, with its name
    ],
    "code": [
        functools.partial(put, F.relu, "__code__", each)
        for each in (*_CODES, _under_torchs_name(_CODES[0]))
    ],
    "defaults": [
        functools.partial(put, F.relu, "__defaults__", each) for each in ((True,), (1,), (0,))
    ],
    "tables of operators": [functools.partial(_rule, how) for how in ("given", "written")],
    "places of operators": [
        functools.partial(put, owner, name, value)
        for owner, name, values in _PLACES
        for value in values
    ],
    "kernels": [
        functools.partial(_kernel, name, function)
        for name in ("prims::sin", "aten::silu", "quantized::add_relu")
        for function in (_tripled, torch._refs.cos)
    ],
    "a rule for an operator defined in Python": [_formula],
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_alteration_inside_torch_keeps_graphs_from_the_first_level(
    what: str, tmp_path: Path
) -> None:
    """The key is as before once the alteration is undone."""
    with s3cache.enabled(local_dir=tmp_path):
        plain = key()
        for altered in ALTERED[what]:
            with altered():
                assert set(codes()) == {"override"}
            assert key() == plain


def test_a_replaced_function_inside_a_wrapper_of_torch_keeps_graphs_from_the_first_level() -> None:
    """The second level's key says which of the many functions of one decorator it is."""
    plain = key()
    found = []
    for name in ("mish", "elu", "mish"):
        formula = torch._decomp.decomposition_table[getattr(torch.ops.aten, name).default]
        assert isinstance(formula, types.FunctionType)
        (cell,) = formula.__closure__ or ()
        with put(cell, "cell_contents", _tripled):
            found.append(replaced())
    assert found[0] == found[2] != found[1]
    assert key() == plain


# -- changes that are not alterations


def test_changes_that_no_compile_reads_are_in_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Added names; state in closures; slots, which ``copyreg`` stores; operators of programs."""
    count = 0

    def add() -> None:
        nonlocal count
        count += 1  # a function that assigns to a variable changes it whenever it runs

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    FUNCTIONS.add([add, lambda: count])
    plain = key()
    assert overrides() == ""
    add()
    torch.library.triton_op("s3cache_tests::wrapped", doubled, mutates_args=())
    monkeypatch.setattr(torch, "s3cache_mine", lambda: count, raising=False)
    monkeypatch.setattr(torch, "load", lambda *_: time.time())
    monkeypatch.setattr(torch, "layer_norm", torch.layer_norm)
    for kind in (Tensor, torch.nn.Parameter):
        monkeypatch.setattr(kind, "__slotnames__", [], raising=False)
    assert key() == plain
    assert overrides() == ""


def test_user_operators_do_not_change_keys_of_other_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with their own rules, like torchao's: only keys of graphs with them contain them."""
    with s3cache.enabled(local_dir=tmp_path):
        plain = key()
        for factor in (2, 3):
            library = torch.library.Library("s3cache_overrides", "FRAGMENT")
            library.define("passing(Tensor x) -> Tensor")
            library.impl("passing", lambda x, by=factor: x * by, "CompositeImplicitAutograd")
            operator = torch.ops.s3cache_overrides.passing.default
            assert operator(torch.ones(1)) == factor
            operator.py_impl(_KEY)(_tripled)
            for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
                monkeypatch.setitem(table, operator, _tripled)
                assert key() == plain
            library._destroy()
            assert key() == plain
        delattr(torch.ops, "s3cache_overrides")
        assert key() == plain


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("dispatch_key", ["Autograd", "AutogradCPU", "CPU"])
def test_kernels_that_were_registered_without_a_record_are_seen(dispatch_key: str) -> None:
    """Also if another kernel was seen before: s3cache reads an operator's kernels again."""
    forget_kernels()
    for each in ("CompositeImplicitAutograd", dispatch_key):
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("celu", lambda x, alpha=1.0: torch.sin(x), each)
            assert replaced_kernels().get(f"aten/celu/{each}") == __file__
        finally:
            library._destroy()
        assert f"aten/celu/{each}" not in replaced_kernels()


@pytest.mark.parametrize("kind", ["holds itself", "too much in it"])
def test_a_function_with_too_large_defaults_has_no_identity(kind: str) -> None:
    given: list[Any] = [1.0]
    if kind == "holds itself":
        given.append(given)
    for _ in range(0 if kind == "holds itself" else 60):
        given = [given, given]
    function = types.FunctionType(F.dropout.__code__, F.dropout.__globals__, "dropout", (given,))
    assert identity(F.dropout)
    with pytest.raises(UnidentifiedError, match="refers to too much"):
        identity(function)
