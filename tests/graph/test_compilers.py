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


def test_a_decomposition_keeps_a_graph_from_the_first_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In torch's table, and in the copy of it that torch goes by once it has made one."""
    from torch._inductor import decomposition

    def codes() -> list[str]:
        return [reason.target for reason in graph_by("inductor").reasons]

    assert codes() == []
    copied = decomposition.fast_random_decomps()
    for table in (decomposition.decompositions, copied):
        monkeypatch.setitem(table, torch.ops.aten.tanh.default, lambda x: x * 2)
        assert any("aten.tanh.default" in each for each in codes())
