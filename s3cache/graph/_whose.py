"""Whose something is that stands where torch looks, and what it is, in words.

Whether it is torch's is decided by where its code lies, and by nothing that it says of itself.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Container, Iterator
from functools import partial

from s3cache.graph._distribution import origin_of
from s3cache.graph._identity import NATIVE, UnidentifiedError, content_of, identity
from s3cache.torch_api import internals

__all__ = [
    "ABSENT",
    "are_alike",
    "foreign_parts",
    "is_code",
    "is_foreign",
    "shown",
    "text_of",
]

ABSENT = object()

_HOLDERS = (staticmethod, classmethod)
_MAX_DEPTH = 8
_BY_OTHER_NAMES = {
    "itruediv": "idiv",
    "logsigmoid": "log_sigmoid",
    "pos": "positive",
    "torch_dispatch": "disabled_torch_dispatch_impl",
    "torch_function": "disabled_torch_function_impl",
}


def is_foreign(value: object, name: object, *, but: Container[object] = ()) -> bool:
    """Whether ``value`` was not put under ``name`` by torch, as far as that can be seen.

    Args:
        but: functions that torch is known to have made, and not in a file.
    """
    if isinstance(value, NATIVE):
        return isinstance(name, str) and not _bears(value.__name__, name)
    if not is_code(value) or isinstance(value, type):
        return False
    return any(not _is_of_torch(part) and part not in but for part in _parts(value))


def is_code(value: object) -> bool:
    """Whether it is called, or runs something where it is read from an object."""
    return callable(value) or isinstance(value, (*_HOLDERS, property, *NATIVE))


def _bears(own: str, name: str) -> bool:
    """Whether a native function is found under its name: ``linalg_inv`` is ``torch.linalg.inv``."""
    own, name = own.strip("_"), name.strip("_")
    return own in (name, _BY_OTHER_NAMES.get(name)) or own.endswith(f"_{name}")


def are_alike(old: object, value: object) -> bool:
    """Whether torch has made the same anew, or only keeps Dynamo out of it."""
    if internals.is_kept_from_dynamo(value, old):
        return True
    if type(old) is not type(value) or isinstance(value, type):
        return False
    try:
        return text_of(old) == text_of(value)
    except UnidentifiedError:
        return False


def _is_of_torch(value: object) -> bool:
    """Whether torch made it, or has it from Python or from what it builds on."""
    if isinstance(value, (*_HOLDERS, property, functools._lru_cache_wrapper)):
        return True  # it depends on what it holds
    if not isinstance(value, (types.FunctionType, *NATIVE)):
        called: object = getattr(type(value), "__call__", None)  # noqa: B004 - to see whose it is
        value = called if isinstance(called, types.FunctionType) else type(value)
    if isinstance(value, types.FunctionType) and internals.has_code_of_torch(value):
        return True
    if origin_of(value).is_versioned:
        return True
    wrapping = sys.modules.get("typing_extensions")  # torch decorates with it
    return isinstance(value, types.FunctionType) and (
        wrapping is not None and value.__globals__ is vars(wrapping)
    )


def _parts(value: object) -> Iterator[object]:
    """``value``, and all functions that it wraps, each once, the outermost first."""
    yield value
    seen, level = {id(value)}, _wrapped(value)
    for _ in range(_MAX_DEPTH):
        inner = {id(each): each for each in level if id(each) not in seen}
        if not inner:
            return
        yield from inner.values()
        seen |= inner.keys()
        level = [each for part in inner.values() for each in _wrapped(part)]


def _wrapped(value: object) -> list[object]:
    """What a function has in its closure, a partial or a bound method calls."""
    inner: tuple[object, ...] = ()
    if isinstance(value, types.FunctionType):
        inner = tuple(content_of(cell) for cell in value.__closure__ or ())
    elif isinstance(value, partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (types.MethodType, *_HOLDERS)):
        inner = (value.__func__,)
    elif isinstance(value, property):
        inner = (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools._lru_cache_wrapper):
        inner = (value.__wrapped__,)
    return [each for each in inner if callable(each) and not isinstance(each, type)]


def foreign_parts(value: object) -> list[object]:
    """What of ``value``, and of all that it wraps, is not torch's; nothing if it is torch's."""
    parts = list(_parts(value))
    if all(map(_is_of_torch, parts)):
        return []
    return [part for part in parts if isinstance(part, partial) or not _is_of_torch(part)]


def text_of(value: object, registered: Callable[[object], str | None] = lambda _: None) -> str:
    """Return what ``value`` is, in words that another process has for the same code only.

    Raises:
        UnidentifiedError: some of its code has no identity.
    """
    return "nothing" if value is ABSENT else identity(value, registered)


def shown(name: object) -> str:
    return name if isinstance(name, str) else str(name)
