"""Operators of others: which rules keep a graph from the first level, and what is in keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import einops.einops
import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

import s3cache
from s3cache.graph._operators import operator_component, refaked_operators

_names = itertools.count()


def _forward(x: Tensor) -> Tensor:
    return x * 2


def _in_place(x: Tensor) -> None:
    x.mul_(2)


def _graph_of(operator: Any) -> GraphModule:
    graph = Graph()
    graph.output(graph.call_function(operator, (graph.placeholder("x"),)))
    return GraphModule({}, graph)


def _operator(definition: Any) -> Any:
    space, _, name = definition._qualname.partition("::")
    return getattr(getattr(torch.ops, space), name).default


def _unregistered(_: object) -> None:
    return None


def _codes(operator: Any, *, traced: bool = False) -> list[str]:
    _, unsafe = operator_component(_graph_of(operator), _unregistered, traced=traced)
    return [each.code for each in unsafe]


@pytest.fixture
def define() -> Iterator[Callable[..., Any]]:
    """Define an operator that only runs at run time, without any rule."""
    made: list[Any] = []

    def define(forward: Any = _in_place, mutates: Any = ("x",), **more: Any) -> Any:
        name = f"s3cache_operators::op{next(_names)}"
        made.append(torch.library.custom_op(name, forward, mutates_args=mutates, **more))
        return made[-1]

    yield define
    for each in made:
        each._lib._destroy()


def test_an_operator_without_rules_only_runs_at_run_time(define: Callable[..., Any]) -> None:
    assert _codes(_operator(define())) == []


def _fake(definition: Any) -> None:
    definition.register_fake(lambda x: None)


def _formula(definition: Any) -> None:
    definition.register_autograd(lambda ctx, grad: grad)


def _vmap(definition: Any) -> None:
    definition.register_vmap(lambda info, dims, x: (None, None))


def _autocast(definition: Any) -> None:
    definition.register_autocast("cpu", torch.bfloat16)


def _kernel_in_python(definition: Any) -> None:
    _operator(definition).py_impl(torch._C.DispatchKey.AutogradCPU)(_in_place)


@pytest.mark.parametrize("rule", [_fake, _formula, _vmap, _autocast, _kernel_in_python])
def test_a_rule_takes_part_in_tracing(rule: Any, define: Callable[..., Any]) -> None:
    definition = define(_forward, ()) if rule is _formula else define()
    rule(definition)
    assert _codes(_operator(definition)) == ["custom-operator"]
    assert _codes(_operator(definition), traced=True) == []


@pytest.mark.parametrize("key", ["Meta", "CompositeImplicitAutograd", "Autograd", "AutocastCPU"])
def test_so_does_a_kernel_for_any_key_but_a_devices(key: str) -> None:
    library = torch.library.Library("s3cache_operators", "FRAGMENT")
    try:
        name = f"keyed{next(_names)}"
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, _forward, "CPU")
        operator = getattr(torch.ops.s3cache_operators, name).default
        assert _codes(operator) == []
        library.impl(name, _forward, key)
        assert _codes(operator) == ["custom-operator"]
    finally:
        library._destroy()


def test_torchs_own_operators_are_no_ones_code(define: Callable[..., Any]) -> None:
    for operator in (
        torch.ops.aten.sin.default,
        torch.ops.prims.sin.default,
        torch.ops.quantized.add_relu.default,
        torch.ops._c10d_functional.wait_tensor.default,
    ):
        assert operator_component(_graph_of(operator), _unregistered, traced=False) == (None, [])


def test_schema_tags_and_version_are_in_the_key(define: Callable[..., Any]) -> None:
    """Inductor reads the first two; the third is what the user promises by."""
    plain = _operator(define(_forward, ()))
    tagged = _operator(define(_forward, (), tags=(torch.Tag.needs_fixed_stride_order,)))

    def versioned(version: str) -> Callable[[object], str | None]:
        return lambda _: version

    found = [
        operator_component(_graph_of(operator), versioned(version), traced=False)
        for operator in (plain, tagged)
        for version in ("1", "2")
    ]
    assert [unsafe for _, unsafe in found] == [[], [], [], []]
    assert len({str(component) for component, _ in found}) == 4


def test_a_fake_of_a_flexible_layout_needs_an_identity(
    define: Callable[..., Any], install: Callable[..., Any]
) -> None:
    """Inductor calls it again, on inputs that are not laid out as they were traced."""
    library = install("def fake(x): return x.clone()")
    for fake, codes in ((_forward, ["generator"]), (library.fake, [])):
        for tags, wanted in (((torch.Tag.flexible_layout,), codes), ((), [])):
            definition = define(_forward, (), tags=tags)
            torch.library.register_fake(definition._qualname, fake, lib=definition._lib)
            _, unsafe = refaked_operators(_graph_of(_operator(definition)), _unregistered)
            assert [each.code for each in unsafe] == wanted


# -- functions that torch takes for its own by their names


def keys(function: Callable[..., Any], *args: Any) -> list[Any]:
    graphs = s3cache.check(torch.compile(function), *args).graphs
    return [graph.key or [reason.code for reason in graph.reasons] for graph in graphs]


def test_a_function_that_torch_knows_by_name_is_known_by_its_file(
    install: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """einops before 0.8.2 is in graphs as it is; a program's function may bear that name."""
    library = install("def rearrange(x): return x * 2")

    def key_with(made: Any) -> Any:
        made.__module__, made.__qualname__ = "einops.einops", "rearrange"
        monkeypatch.setattr(einops.einops, "rearrange", made)
        torch.compiler.allow_in_graph(made)
        (key,) = keys(lambda x: made(x) + 1, torch.ones(3))
        return key

    def rearrange(x: Tensor) -> Tensor:
        return x * 2

    assert isinstance(key_with(library.rearrange), str)
    assert key_with(rearrange) == ["function"]
