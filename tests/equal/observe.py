"""Observe what a program's caller can see of its values, as JSON values, and compare them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: What callers see first; the other fields of a tensor are its relations to other tensors.
SEEN = frozenset({"where", "kind", "dtype", "shape", "stride", "requires_grad", "values", "text"})


def observe(values: Any) -> list[dict[str, Any]]:
    """Return an observation of each value in nested lists, tuples and dicts, in order.

    For a tensor it has metadata, autograd state, the numbers, and the relation to other tensors:
    the same object, in the same storage, a view of it.
    """
    flat = [*_flat(values, "")]
    tensors = [value for _, value in flat if isinstance(value, Tensor)]
    return [{"where": where, **_described(value, tensors)} for where, value in flat]


def differences(
    found: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    fields: Collection[str] = (),
    close: float = 2e-4,
) -> Iterator[str]:
    """Yield each difference in ``fields`` (all, if it is empty).

    Args:
        close: the tolerance, relative and absolute. Numbers of 16 bits may differ by more; if it is
            0, no number may.
    """
    if len(found) != len(expected):
        yield f"{len(found)} values: {_short(found)}, not {len(expected)}: {_short(expected)}"
        return
    for got, wanted in zip(found, expected, strict=True):
        half = str(wanted.get("dtype")) in ("torch.bfloat16", "torch.float16")
        tolerance = 3e-2 if half and close else close
        for name in sorted({*got, *wanted}):
            one, other = got.get(name), wanted.get(name)
            if (not fields or name in fields) and not _equal(one, other, tolerance):
                yield f"{wanted['where']}.{name}: {_short(one)}, not {_short(other)}"


def difference(*compared: Any, **how: Any) -> str:
    """Return the first of the :func:`differences`, or an empty text."""
    return next(differences(*compared, **how), "")


def _flat(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves; the inner tensors of a wrapper subclass follow it."""
    if isinstance(value, (list, tuple)):
        start, end = "[]" if isinstance(value, list) else "()"
        for index, each in enumerate(value):
            yield from _flat(each, f"{where}{start}{index}{end}")
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _flat(each, f"{where}.{name!r}")
    else:
        yield where, value
        if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from _flat(getattr(value, name), f"{where}.{name}")


def _described(value: Any, tensors: list[Tensor]) -> dict[str, Any]:
    kind = {"kind": type(value).__name__}
    if isinstance(value, Tensor):
        return {**kind, **_tensor(value, tensors)}
    if isinstance(value, (float, int, np.ndarray, np.number)) and not isinstance(value, bool):
        return {**kind, "values": np.asarray(value, dtype=float).flatten().tolist()}
    return {**kind, "text": repr(value)}


def _tensor(value: Tensor, tensors: list[Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "dtype": str(value.dtype),
        "requires_grad": value.requires_grad,
        "is_leaf": value.is_leaf,
        "is_view": value._is_view(),
        "same": _first(tensors, lambda each: each is value),
        "base": None if value._base is None else _first(tensors, lambda e: e is value._base),
    }
    if is_traceable_wrapper_subclass(value):
        # Sizes of jagged tensors are symbols, which differ; the inner tensors are observed.
        return {**found, "dim": value.dim()}
    found["shape"] = [*value.shape]
    dense = value.detach()
    if value.layout == torch.strided:
        storage = value.untyped_storage()
        found["stride"] = [*value.stride()]
        if value.is_meta:
            return found
        found.update(
            offset=value.storage_offset(),
            storage=_first(tensors, lambda each: _shares(each, storage)),
            bytes=storage.nbytes(),
        )
        if value.numel() and not storage.nbytes():
            return found  # its storage was resized to nothing, so that it has no numbers
    else:
        dense = dense.to_dense()
    dense = dense.resolve_conj().resolve_neg()
    numbers = torch.view_as_real(dense) if dense.is_complex() else dense
    return {**found, "values": numbers.double().flatten().tolist()}


def _first(tensors: list[Tensor], is_it: Any) -> int | str:
    return next((index for index, each in enumerate(tensors) if is_it(each)), "none of them")


def _shares(tensor: Tensor, storage: Any) -> bool:
    if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
        return False
    return bool(tensor.untyped_storage()._cdata == storage._cdata)


def _equal(one: Any, other: Any, close: float) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_equal(a, b, close) for a, b in pairs)
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=close, abs_tol=close)
    return bool(one == other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."
