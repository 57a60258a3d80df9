"""Functions that torch takes for its own by their names are in the key by their code."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import einops.einops
import pytest
import torch
from torch import Tensor

import s3cache
from s3cache.graph._code import UntoldError, fingerprint
from s3cache.graph._definitions import parts_of


def keys(function: Callable[..., Any], *args: Any) -> list[str | None]:
    return [graph.key for graph in s3cache.check(torch.compile(function), *args).graphs]


def test_a_function_that_torch_knows_by_name_is_in_the_key_by_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """einops before 0.8.2 is in graphs as it is; two bodies under one name are two functions."""

    def key_with(body: Callable[[Tensor], Tensor], name: str) -> str | None:
        def rearrange(x: Tensor) -> Tensor:
            return body(x)

        rearrange.__module__, rearrange.__qualname__ = "einops.einops", "rearrange"
        namespace = {"__name__": name}
        made = functools.update_wrapper(_with_globals(rearrange, namespace), rearrange)
        del made.__wrapped__
        monkeypatch.setattr(einops.einops, "rearrange", made)
        torch.compiler.allow_in_graph(made)
        (key,) = keys(lambda x: made(x) + 1, torch.ones(3))
        return key

    for home in ("einops.einops", "mine"):
        first = key_with(lambda x: x * 2, home)
        assert first is not None
        assert key_with(lambda x: x * 2, home) == first
        assert key_with(lambda x: x * 3, home) not in (first, None)
    assert key_with(lambda x: x * time.time(), "mine") is None


def _with_globals(function: Any, namespace: dict[str, Any]) -> Any:
    return type(function)(
        function.__code__, namespace, function.__name__, None, function.__closure__
    )


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    mine = torch.ops.s3cache_tests_later\n    return mine.op(x)",
        "def f(x):\n    ops = torch.ops\n    return ops.s3cache_tests_later.op(x)",
        "def f(x):\n    it = torch\n    return it.ops.s3cache_tests_later.op(x)",
    ],
)
def test_an_operator_that_code_takes_from_its_namespace_is_followed(source: str) -> None:
    def of(schema: str) -> str:
        library = torch.library.Library("s3cache_tests_later", "DEF")
        try:
            library.define(schema)
            names: dict[str, Any] = {"torch": torch}
            exec(source, names)
            return fingerprint(names["f"], parts_of(lambda _: None))
        finally:
            library._destroy()

    one, other = "op(Tensor x, int by=1) -> Tensor", "op(Tensor x, int by=2) -> Tensor"
    assert of(one) == of(one) != of(other)


def test_all_operators_of_a_namespace_cannot_be_told() -> None:
    def any_of_them(x: Tensor, name: str) -> Any:
        return getattr(torch.ops.s3cache_tests_any, name)(x)

    with pytest.raises(UntoldError, match="all operators of"):
        fingerprint(any_of_them)
