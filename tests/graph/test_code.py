"""Digests of functions: equal for equal behaviour, and different where behaviour may be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from s3cache.graph._code import fingerprint


def written(source: str, **names: Any) -> Callable[..., Any]:
    exec(source, names)
    function: Callable[..., Any] = names["f"]
    return function


BASE = "def f(x, by=2): return x.sin() * by + 1"


def helper(x: int) -> int:
    return x + 1


def other_helper(x: int) -> int:
    return x + 2


@pytest.mark.parametrize(
    "source",
    [
        BASE,
        "\n\n# a comment\ndef f(x, by=2):\n    return x.sin() * by + 1",
        "def f(y, factor=2): return y.sin() * factor + 1",
    ],
)
def test_what_does_not_matter(source: str) -> None:
    assert fingerprint(written(source)) == fingerprint(written(BASE))


@pytest.mark.parametrize(
    "source",
    [
        "def f(x, by=3): return x.sin() * by + 1",
        "def f(x, by=2): return x.cos() * by + 1",
        "def f(x, by=2): return x.sin() * by + 2",
        "def f(x, by=2): return x.sin() * by + 1.0",
        "def f(x, by=2): return x.sin() * by - 1",
        "def f(x, *, by=2): return x.sin() * by + 1",
        "def f(x, by=2): return (lambda: x.sin() * by + 1)()",
    ],
)
def test_what_matters(source: str) -> None:
    assert fingerprint(written(source)) != fingerprint(written(BASE))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (helper, other_helper),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (torch.ones(2), torch.zeros(2)),
        (torch.float32, torch.float64),
        (functools.partial(helper, 1), functools.partial(helper, 2)),
        (written("def f(): return G", G=1), written("def f(): return G", G=2)),
    ],
)
def test_what_it_refers_to_matters(one: Any, other: Any) -> None:
    source = "def f(x): return (x, value)"
    again = [fingerprint(written(source, value=each)) for each in (one, one, other)]
    assert again[0] == again[1] != again[2]

    def closing_over(value: Any) -> Callable[..., Any]:
        return lambda x: (x, value)

    assert fingerprint(closing_over(one)) == fingerprint(closing_over(one))
    assert fingerprint(closing_over(one)) != fingerprint(closing_over(other))


def test_a_user_function_that_poses_as_torchs_is_looked_into() -> None:
    def posing(value: int) -> Callable[..., Any]:
        @functools.wraps(torch.nn.functional.relu)
        def relu(x: Any) -> Any:
            return x + value

        return relu

    assert posing(1).__module__ == "torch.nn.functional"
    assert fingerprint(posing(1)) != fingerprint(posing(2))


def test_a_user_function_inside_of_torchs_is_looked_into() -> None:
    def wrapped(value: int) -> Callable[..., Any]:
        return torch.no_grad()(lambda x: x + value)

    assert fingerprint(wrapped(1)) == fingerprint(wrapped(1)) != fingerprint(wrapped(2))


def test_functions_that_refer_to_each_other_end() -> None:
    names: dict[str, Any] = {}
    exec("def f(n): return g(n - 1)\ndef g(n): return f(n - 1)", names)
    assert fingerprint(names["f"]) == fingerprint(names["f"])
