"""torch's runtime metadata as plain typed data, to be read without torch and without unpickling."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

__all__ = ["describe"]

_MAX_ITEMS = 4096
_MAX_DEPTH = 10


def describe(value: Any) -> dict[str, Any]:
    """The fields of one of AOTAutograd's metadata objects, each with its type where it is one.

    Sizes and strides become lists of integers or symbol names; what has no plain form is given
    by its ``repr``. Long lists are cut.
    """
    described = _plain(value, 0)
    return described if isinstance(described, dict) else {"value": described}


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else str(value)
    if isinstance(value, float):
        return value
    if depth >= _MAX_DEPTH:
        return repr(value)[:200]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            "type": type(value).__name__,
            **{
                each.name: _plain(getattr(value, each.name, None), depth + 1)
                for each in dataclasses.fields(value)
            },
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)[:_MAX_ITEMS]
        return [_plain(each, depth + 1) for each in items]
    if isinstance(value, dict):
        items = list(value.items())[:_MAX_ITEMS]
        return {str(name): _plain(each, depth + 1) for name, each in items}
    return repr(value)[:200]
