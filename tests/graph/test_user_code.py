"""User code that takes part in tracing: operators, functions and tensor subclasses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import einops.einops
import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import decompositions, register_decomposition
from torch.fx import Graph, GraphModule
from torch.testing._internal.two_tensor import TwoTensor

import s3cache
from s3cache.graph import Graph as CheckedGraph
from s3cache.graph._user_code import custom_operators, refaked_operators, traced_operators
from tests.graph.checking import Wrapped, checked, sine

_names = itertools.count()
_AUTOGRAD = torch._C.DispatchKey.AutogradCPU


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _forward(x: Tensor) -> Tensor:
    return x * 2


def _graph_of(operator: Any) -> GraphModule:
    graph = Graph()
    graph.output(graph.call_function(operator, (graph.placeholder("x"),)))
    return GraphModule({}, graph)


def _operator(definition: Any) -> Any:
    space, _, name = definition._qualname.partition("::")
    return getattr(getattr(torch.ops, space), name).default


def _unregistered(_: object) -> None:
    return None


def _codes(finding: Any) -> list[str]:
    return [reason.code for reason in finding] if isinstance(finding, list) else []


# -- operators


@pytest.fixture
def define() -> Iterator[Callable[..., Any]]:
    """Return a function that defines an operator without any rule for tracing."""
    definitions: list[Any] = []

    def define(**more: Any) -> Any:
        name = f"s3cache_operators::op{next(_names)}"
        definitions.append(torch.library.custom_op(name, _forward, mutates_args=(), **more))
        return definitions[-1]

    yield define
    for definition in definitions:
        decompositions.pop(definition._opoverload, None)
        definition._lib._destroy()


def _rule_codes(operator: Any) -> list[str]:
    return _codes(custom_operators(_graph_of(operator), _unregistered))


@pytest.mark.parametrize(
    "add_rule",
    [
        None,
        lambda definition: definition.register_fake(lambda x: None),
        lambda definition: definition.register_autograd(lambda ctx, grad: grad),
        lambda definition: register_decomposition([_operator(definition)])(_forward),
        lambda definition: definition.register_vmap(lambda info, dims, x: (None, None)),
        lambda definition: definition.register_autocast("cpu", torch.bfloat16),
        lambda definition: _operator(definition).py_impl(_AUTOGRAD)(_forward),
    ],
)
def test_rules_of_an_operator_take_part_in_tracing(
    add_rule: Any, define: Callable[..., Any]
) -> None:
    definition = define()
    if add_rule is not None:
        add_rule(definition)
    assert _rule_codes(_operator(definition)) == (["custom-operator"] if add_rule else [])


@pytest.mark.parametrize("key", ["Meta", "CompositeImplicitAutograd", "Autograd", "AutocastCPU"])
def test_kernels_take_part_in_tracing_unless_their_key_is_a_device(key: str) -> None:
    library = torch.library.Library("s3cache_operators", "FRAGMENT")
    try:
        name = f"keyed{next(_names)}"
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, _forward, "CPU")
        operator = getattr(torch.ops.s3cache_operators, name).default
        assert _rule_codes(operator) == []
        library.impl(name, _forward, key)
        assert _rule_codes(operator) == ["custom-operator"]
    finally:
        library._destroy()


def test_operators_of_torch_are_not_custom() -> None:
    ops = torch.ops
    for packet in (ops.aten.sin, ops.prims.sin, ops.quantized.add_relu):
        assert custom_operators(_graph_of(packet.default), _unregistered) == ""
    waiting = _graph_of(ops._c10d_functional.wait_tensor.default)
    assert custom_operators(waiting, _unregistered) == ""


def test_schema_tags_and_version_of_an_operator_are_in_the_key(define: Callable[..., Any]) -> None:
    plain = _operator(define())
    tagged = _operator(define(tags=(torch.Tag.needs_fixed_stride_order,)))
    texts = {
        traced_operators(_graph_of(operator), lambda _, version=version: version)  # type: ignore[misc]
        for operator in (plain, tagged)
        for version in ("1", "2")
    }
    assert len(texts) == 4


def test_the_fake_of_an_operator_with_flexible_layout_needs_an_identity(
    define: Callable[..., Any], install: Callable[..., Any]
) -> None:
    """Inductor calls it again, on inputs with another layout than in tracing."""
    library = install("def fake(x): return x.clone()")
    for fake, codes in ((_forward, ["generator"]), (library.fake, [])):
        for tags, wanted in (((torch.Tag.flexible_layout,), codes), ((), [])):
            definition = define(tags=tags)
            torch.library.register_fake(definition._qualname, fake, lib=definition._lib)
            found = refaked_operators(_graph_of(_operator(definition)), _unregistered)
            assert _codes(found) == wanted


# -- functions


def test_a_function_that_torch_knows_by_name_is_identified_by_its_file(
    install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs call einops before 0.8.2 itself; a program's function may have the same name."""
    library = install("def rearrange(x): return x * 2")

    def graph_with(made: Any) -> CheckedGraph:
        made.__module__, made.__qualname__ = "einops.einops", "rearrange"
        monkeypatch.setattr(einops.einops, "rearrange", made)
        torch.compiler.allow_in_graph(made)
        return checked(lambda x: made(x) + 1, torch.ones(3))

    def rearrange(x: Tensor) -> Tensor:
        return x * 2

    assert graph_with(library.rearrange).key
    assert _codes([*graph_with(rearrange).reasons]) == ["function"]


# -- tensor subclasses


class Config:
    """Data of a subclass beside its tensors."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config)

    def __hash__(self) -> int:
        return 0


class Registered(Wrapped): ...


@pytest.mark.parametrize("config", [None, Config(), [{"k": Config()}]])
def test_a_user_subclass_keeps_a_graph_from_the_first_level(config: Any) -> None:
    graph = checked(sine, Wrapped(torch.ones(3), config))
    assert (graph.key, _codes([*graph.reasons])) == (None, ["subclass"])
    assert "register_cacheable" in graph.reasons[0].fix
    assert graph.in_halves


@pytest.mark.filterwarnings("ignore:TwoTensor does not implement")
def test_a_subclass_of_torch_has_a_key_unless_it_wraps_a_user_subclass() -> None:
    x = torch.ones(3)
    assert "TwoTensor" in checked(sine, TwoTensor(x, x * 2)).components["graph.subclasses"].value
    assert checked(sine, TwoTensor(Wrapped(x), Wrapped(x))).key is None


def test_the_version_of_a_registered_subclass_is_in_the_key() -> None:
    s3cache.register_cacheable(Registered, version="1")
    first = checked(sine, Registered(torch.ones(3)))
    assert "version 1" in first.components["graph.subclasses"].value
    s3cache.register_cacheable(Registered, version="2")
    assert checked(sine, Registered(torch.ones(3))).key not in (first.key, None)
    assert "graph.subclasses" not in checked(sine, torch.ones(3)).components
