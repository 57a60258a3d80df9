"""Helpers that check a program with one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import s3cache
from s3cache.graph import Graph


class Wrapped(torch.Tensor):
    """A tensor subclass of a program that wraps one tensor, and may carry an object."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: torch.Tensor, carried: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, carried: Any = None) -> None:
        self.inner, self.carried = inner, carried

    def __tensor_flatten__(self) -> Any:
        return ["inner"], self.carried

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, carried: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"], carried)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [each.inner if isinstance(each, cls) else each for each in args]
        return cls(func(*plain, **(kwargs or {})))

    def _stable_hash_for_caching(self) -> str:
        """Return the hash that torch asks for; it need not depend on the subclass's code."""
        return "wrapped"


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def checked(program: Callable[..., Any] = sine, *inputs: Any) -> Graph:
    """Return the only graph of ``program``, called with ``inputs`` or with a matrix."""
    (graph,) = s3cache.check(program, *(inputs or (torch.ones(4, 4),))).graphs
    return graph


def key_of(program: Callable[..., Any] = sine, *inputs: Any) -> str | None:
    """Return the key of the only graph of ``program``, or None."""
    return checked(program, *inputs).key


def codes(program: Callable[..., Any] = sine, *inputs: Any) -> list[str]:
    """Return the codes of the reasons why the graph of ``program`` is not cached."""
    return [reason.code for reason in checked(program, *inputs).reasons]


@contextlib.contextmanager
def put(owner: Any, name: str, *values: Any) -> Iterator[None]:
    """Set an attribute for a while; without a value, delete it."""
    with pytest.MonkeyPatch.context() as patched:
        if values:
            patched.setattr(owner, name, *values)
        else:
            patched.delattr(owner, name)
        yield
