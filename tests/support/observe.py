"""Observe what a program's caller can see of tensors, and compare two programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def observe(values: Any) -> list[dict[str, Any]]:
    """Return one observation for each value in nested lists, tuples and dicts, in order.

    For a tensor it has metadata, autograd state, a copy of the numbers, and the relation to other
    tensors: the same object, in the same storage, a view of it.
    """
    flat = list(_flat(values, ""))
    tensors = [value for _, value in flat if _is_tensor(value)]
    return [
        {"where": where, **(_tensor(value, tensors) if _is_tensor(value) else {"value": value})}
        for where, value in flat
    ]


def differences(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Return each difference from what is expected; numbers may differ by rounding."""
    if [each["where"] for each in expected] != [each["where"] for each in found]:
        return [f"structure: {[e['where'] for e in expected]} {[e['where'] for e in found]}"]
    return [
        f"{wanted['where']}.{name}: {_short(wanted.get(name))} became {_short(got.get(name))}"
        for wanted, got in zip(expected, found, strict=True)
        for name in sorted({*wanted, *got})
        if not _equal(wanted.get(name), got.get(name))
    ]


def _is_tensor(value: Any) -> bool:
    from torch import Tensor

    return isinstance(value, Tensor)


def _flat(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves; the inner tensors of a wrapper subclass follow it."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _flat(each, f"{where}[{index}]")
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _flat(each, f"{where}.{name}")
    else:
        yield where, value
        if _is_tensor(value) and is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from _flat(getattr(value, name), f"{where}.{name}")


def _tensor(value: Any, others: list[Any]) -> dict[str, Any]:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    found = {
        "type": type(value).__name__,
        "dtype": str(value.dtype),
        "requires_grad": value.requires_grad,
        "is_leaf": value.is_leaf,
        "is_view": value._is_view(),
        "same": _first(others, lambda each: each is value),
        "base": None if value._base is None else _first(others, lambda e: e is value._base),
    }
    if is_traceable_wrapper_subclass(value):
        # Sizes of jagged tensors are symbols, which differ; the inner tensors are observed.
        return {**found, "dim": value.dim()}
    storage = value.untyped_storage()
    return {
        **found,
        "shape": tuple(value.shape),
        "stride": value.stride(),
        "offset": value.storage_offset(),
        "storage": _first(others, lambda each: _shares(each, storage)),
        "bytes": storage.nbytes(),
        "values": value.detach().clone() if _is_backed(value) else None,
    }


def _is_backed(value: Any) -> bool:
    """Return whether the storage has the numbers; if it was resized to 0 bytes, it has none."""
    return bool(value.untyped_storage().nbytes() or not value.numel())


def _first(tensors: list[Any], is_it: Any) -> int | str:
    return next((index for index, each in enumerate(tensors) if is_it(each)), "none of them")


def _shares(tensor: Any, storage: Any) -> bool:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        return False
    return bool(tensor.untyped_storage()._cdata == storage._cdata)


def _equal(expected: Any, found: Any) -> bool:
    import torch

    if _is_tensor(expected) and _is_tensor(found):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return False
        tolerance = 1e-2 if expected.dtype in (torch.bfloat16, torch.float16) else 1e-5
        return torch.allclose(expected, found, rtol=tolerance, atol=tolerance, equal_nan=True)
    return bool(type(expected) is type(found) and expected == found)


def _short(value: Any) -> str:
    text = repr(value.tolist() if _is_tensor(value) else value)
    return text if len(text) < 300 else f"{text[:300]}..."
