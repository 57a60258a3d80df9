"""What a backend of the user's has a graph compiled by keeps it from the first level."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.output_code import OutputCode

import s3cache


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graph_by(backend: Callable[..., Any] | str) -> s3cache.Graph:
    program = torch.compile(lambda x: torch.tanh(x) + 1, backend=backend)
    (graph,) = s3cache.check(program, torch.ones(3)).graphs
    return graph


def giving(**given: Any) -> Callable[..., Any]:
    return lambda gm, inputs: compile_fx(gm, inputs, **given)


def inner_by(factor: float) -> Callable[..., Any]:
    def inner_compile(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        return compile_fx_inner(gm, inputs, **{**kwargs, "factor": factor})

    return inner_compile


def _lower(factor: float, gm: Any, inputs: Any, **kwargs: Any) -> Any:
    return compile_fx_inner(gm, inputs, **{**kwargs, "factor": factor})


def table_by(factor: float) -> dict[Any, Any]:
    return {**select_decomp_table(), torch.ops.aten.tanh.default: lambda x: x * factor}


def compiler_by(factor: float) -> Callable[..., Any]:
    lower: Any = functools.partial(_lower, factor)
    compiler = SerializableAOTDispatchCompiler(OutputCode, lower)
    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler)


@pytest.mark.parametrize(
    "make",
    [
        lambda factor: giving(inner_compile=inner_by(factor)),
        lambda factor: giving(inner_compile=functools.partial(_lower, factor)),
        lambda factor: giving(decompositions=table_by(factor)),
        compiler_by,
    ],
)
def test_what_a_backend_compiles_by_keeps_a_graph_from_the_first_level(
    make: Callable[[float], Any],
) -> None:
    graph = graph_by(make(2.0))
    assert [reason.code for reason in graph.reasons] == ["custom-callable"]
    assert graph.in_halves


def test_what_is_torchs_own_says_nothing() -> None:
    usual = graph_by("inductor")
    assert "compile.compilers" not in usual.components
    for given in ({}, {"inner_compile": compile_fx_inner}, {"decompositions": table()}):
        assert graph_by(giving(**given)).key == usual.key


def table() -> dict[Any, Any]:
    return dict(select_decomp_table())


def inner(gm: Any, inputs: Any, **kwargs: Any) -> Any:
    return compile_fx_inner(gm, inputs, **kwargs)


def test_one_that_the_user_registers_is_in_the_key_by_its_version() -> None:
    (reason,) = graph_by(giving(inner_compile=inner)).reasons
    assert "inner_compile" in reason.message
    exec(reason.fix)  # as users do who paste it
    first = graph_by(giving(inner_compile=inner)).key
    s3cache.register_cacheable(inner, version="2")
    assert None not in (first, second := graph_by(giving(inner_compile=inner)).key)
    assert second != first


def test_a_decomposition_counts_from_when_torch_goes_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch goes by a copy of its table, once it has made one: with what was in there by then."""
    from torch._inductor import decomposition

    def codes() -> list[str]:
        return [reason.target for reason in graph_by("inductor").reasons]

    copied = decomposition.fast_random_decomps()
    monkeypatch.setitem(decomposition.decompositions, torch.ops.aten.tanh.default, lambda x: x * 2)
    late = codes()
    monkeypatch.setitem(copied, torch.ops.aten.tanh.default, lambda x: x * 2)
    assert len({str(late), str(early := codes()), "[]"}) == 3
    assert any("decompositions" in each for each in early)
