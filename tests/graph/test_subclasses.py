"""Tensor subclasses are in keys by their code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import s3cache


class Config:
    """What a subclass carries beside its tensors."""

    scale = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config)

    def __hash__(self) -> int:
        return 0


def scaled(x: Tensor) -> Tensor:
    return x


class Wrapped(torch.Tensor):
    inner: Any
    table: Any = {"f": scaled}  # noqa: RUF012 - a table of operators, as libraries have them

    @staticmethod
    def __new__(cls, inner: Tensor, config: Config | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor, config: Config | None = None) -> None:
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
        return cls(cls.table["f"](func(*plain, **(kwargs or {}))))

    def _stable_hash_for_caching(self) -> str:
        """What torch asks of subclasses; it need not say what their code does."""
        return "wrapped"

    def export(self, path: str) -> None:
        """Not called by any code that is traced."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(time.time()))


class Vouched(Wrapped):
    table: Any = {"f": lambda x: x * time.time()}  # noqa: RUF012


def graph_of(x: Any) -> Any:
    def program(x: Any) -> Any:
        y: Any = torch.sin(x)
        return y.inner + 1

    (graph,) = s3cache.check(torch.compile(program), x).graphs
    return graph


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_what_a_subclass_does_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first = graph_of(Wrapped(torch.ones(3)))
    assert "Wrapped" in first.components["graph.subclasses"].value
    assert graph_of(Wrapped(torch.ones(3))).key == first.key
    monkeypatch.setattr(Wrapped, "table", {"f": lambda x: x * 2})
    assert graph_of(Wrapped(torch.ones(3))).key not in (first.key, None)


def test_so_is_what_it_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    first = graph_of(Wrapped(torch.ones(3), Config())).key
    assert graph_of(Wrapped(torch.ones(3), Config())).key == first
    monkeypatch.setattr(Config, "scale", 3.0)
    assert graph_of(Wrapped(torch.ones(3), Config())).key not in (first, None)


class Short(Config):
    """Pickles as less than it is."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __reduce__(self) -> Any:
        return Short, (0.0,)


def carried(x: int) -> int:
    return x + 1


@pytest.mark.parametrize(
    "make", [Short, lambda scale: [{"k": Short(scale)}], lambda scale: (Short(scale), carried)]
)
def test_what_it_carries_counts_by_what_it_is_and_not_by_how_it_is_pickled(make: Any) -> None:
    first = graph_of(Wrapped(torch.ones(3), make(2.0))).key
    assert graph_of(Wrapped(torch.ones(3), make(2.0))).key == first
    assert graph_of(Wrapped(torch.ones(3), make(3.0))).key not in (first, None)


def test_a_function_that_it_carries_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    first = graph_of(Wrapped(torch.ones(3), carried)).key  # type: ignore[arg-type]
    monkeypatch.setattr(carried, "__code__", (lambda x: x + 2).__code__)
    assert graph_of(Wrapped(torch.ones(3), carried)).key not in (first, None)  # type: ignore[arg-type]


def test_one_whose_code_asks_the_process_is_refused_unless_the_user_vouches_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Wrapped, "table", {"f": lambda x: x * time.time()})
    found = graph_of(Wrapped(torch.ones(3)))
    (reason,) = found.reasons
    assert (found.key, reason.code) == (None, "subclass")
    assert "time" in reason.message
    assert "register_cacheable" in reason.fix
    assert not reason.in_any_form  # what was traced is free of it


def test_one_that_the_user_vouches_for_is_in_the_key_by_its_version() -> None:
    assert graph_of(Vouched(torch.ones(3))).key is None
    s3cache.register_cacheable(Vouched, version="1")
    first = graph_of(Vouched(torch.ones(3)))
    assert "version 1" in first.components["graph.subclasses"].value
    s3cache.register_cacheable(Vouched, version="2")
    assert graph_of(Vouched(torch.ones(3))).key not in (first.key, None)


def test_graphs_without_them_have_no_such_component() -> None:
    (graph,) = s3cache.check(torch.compile(lambda x: x.sin()), torch.ones(3)).graphs
    assert "graph.subclasses" not in graph.components
