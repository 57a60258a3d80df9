"""Change settings of torch, and restore them afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@contextlib.contextmanager
def switched(get: Callable[[], T], switch: Callable[[T], object], value: T) -> Iterator[None]:
    before = get()
    switch(value)
    try:
        yield
    finally:
        switch(before)


def attribute(owner: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """Set an attribute, also one that :func:`unittest.mock.patch` cannot restore."""
    return switched(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


def deterministic() -> contextlib.AbstractContextManager[None]:
    return switched(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    )


def precision(precision: str) -> contextlib.AbstractContextManager[None]:
    """Set the precision of float32 matrix products."""
    return switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, precision
    )


def threads(count: int) -> contextlib.AbstractContextManager[None]:
    """Set the number of threads that compute one operator."""
    return switched(torch.get_num_threads, torch.set_num_threads, count)
