"""Tensor subclasses that are not torch's own keep a graph from the first level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import s3cache


class Config:
    """What a subclass carries beside its tensors."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config)

    def __hash__(self) -> int:
        return 0


class Wrapped(torch.Tensor):
    inner: Any

    @staticmethod
    def __new__(cls, inner: Tensor, config: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor, config: Any = None) -> None:
        self.inner, self.config = inner, config

    def __tensor_flatten__(self) -> Any:
        return ["inner"], self.config

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, config: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"], config)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [each.inner if isinstance(each, cls) else each for each in args]
        return cls(func(*plain, **(kwargs or {})))

    def _stable_hash_for_caching(self) -> str:
        """What torch asks of subclasses; it need not say what their code does."""
        return "wrapped"


class Registered(Wrapped): ...


def graph_of(x: Any) -> Any:
    def program(x: Any) -> Any:
        y: Any = torch.sin(x)
        return y + 1

    (graph,) = s3cache.check(torch.compile(program), x).graphs
    return graph


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("config", [None, Config(), [{"k": Config()}]])
def test_code_of_a_subclass_takes_part_in_tracing(config: Any) -> None:
    found = graph_of(Wrapped(torch.ones(3), config))
    (reason,) = found.reasons
    assert (found.key, reason.code) == (None, "subclass")
    assert "register_cacheable" in reason.fix
    assert found.in_halves  # what was traced is free of it


@pytest.mark.filterwarnings("ignore:TwoTensor does not implement")
def test_torchs_own_subclass_has_a_key_and_one_inside_of_it_is_seen() -> None:
    x = torch.ones(3)
    assert "TwoTensor" in graph_of(TwoTensor(x, x * 2)).components["graph.subclasses"].value
    assert graph_of(TwoTensor(Wrapped(x), Wrapped(x))).key is None


def test_one_that_the_user_registers_is_in_the_key_by_its_version() -> None:
    assert graph_of(Registered(torch.ones(3))).key is None
    s3cache.register_cacheable(Registered, version="1")
    first = graph_of(Registered(torch.ones(3)))
    assert "version 1" in first.components["graph.subclasses"].value
    s3cache.register_cacheable(Registered, version="2")
    assert graph_of(Registered(torch.ones(3))).key not in (first.key, None)


def test_graphs_without_them_have_no_such_component() -> None:
    (graph,) = s3cache.check(torch.compile(lambda x: x.sin()), torch.ones(3)).graphs
    assert "graph.subclasses" not in graph.components
