"""What does not change the code that a program compiles to changes no key: entries are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch

import s3cache
from tests.graph.programs import Squared


def key_of(function: Callable[..., Any], *args: Any) -> str:
    """The key of the one graph that the function makes."""
    (graph,) = s3cache.check(torch.compile(function), *args).graphs
    assert graph.key is not None, graph.reasons
    return graph.key


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def squared(x: torch.Tensor) -> Any:
    return Squared.apply(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("program", [sine, squared])
def test_torchs_switch_for_custom_functions_makes_no_other_key(program: Callable[..., Any]) -> None:
    """They are cached with it and without."""
    x = torch.ones(3, requires_grad=True)
    with functorch.patch(autograd_cache_allow_custom_autograd_functions=True):
        allowed = key_of(program, x)
    assert key_of(program, x) == allowed
