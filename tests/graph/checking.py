"""Helpers that check a program with one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import s3cache
from s3cache.graph import Graph


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
