"""Whose something is that stands where torch looks, and what it is, in words.

Whether it is torch's is decided by where its code lies, and by nothing that it says of itself.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Callable, Container, Iterator
from functools import partial
from itertools import chain

from s3cache.graph._code import UntoldError, fingerprint, source_fingerprint
from s3cache.graph._homes import home_of
from s3cache.graph._reads import code_digest, content_of
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

_NATIVE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_HOLDERS = (staticmethod, classmethod)
_MAX_DEPTH = 8
_MAX_CHARS = 1_000_000
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
    if isinstance(value, _NATIVE):
        return isinstance(name, str) and not _bears(value.__name__, name)
    if not is_code(value) or isinstance(value, type):
        return False
    return any(not _is_of_torch(part) and part not in but for part in _parts(value))


def is_code(value: object) -> bool:
    """Whether it is called, or runs something where it is read from an object."""
    return callable(value) or isinstance(value, (*_HOLDERS, property, *_NATIVE))


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
    except UntoldError:
        return False


def _is_of_torch(value: object) -> bool:
    """Whether torch made it, or has it from Python or from what it builds on."""
    if isinstance(value, (*_HOLDERS, property, functools._lru_cache_wrapper)):
        return True  # it depends on what it holds
    if not isinstance(value, (types.FunctionType, *_NATIVE)):
        called: object = getattr(type(value), "__call__", None)  # noqa: B004 - to see whose it is
        value = called if isinstance(called, types.FunctionType) else type(value)
    if isinstance(value, types.FunctionType) and internals.has_code_of_torch(value):
        return True
    if home_of(value).is_named:
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


def whole(kind: type) -> list[object]:
    """A class with all its methods, for torch may call them by names of its own."""
    return [
        kind,
        *(
            [name, member]
            for each in kind.__mro__
            if home_of(each).kind in ("library", "user")
            for name, member in sorted(vars(each).items())
            if callable(member) or isinstance(member, (staticmethod, classmethod, property))
        ),
    ]


def foreign_parts(value: object) -> list[object]:
    """What of ``value``, and of all that it wraps, is not torch's; nothing if it is torch's."""
    parts = list(_parts(value))
    if all(map(_is_of_torch, parts)):
        return []
    return [part for part in parts if isinstance(part, partial) or not _is_of_torch(part)]


def text_of(
    value: object,
    vouched: Callable[[object], str | None] = lambda _: None,
    place: str = "",
    name: object = "",
    *,
    by_source: bool = False,
) -> str:
    """What ``value`` is, in words that another process has for the same, and for nothing else.

    Args:
        by_source: whether to leave out the state that it writes, see :func:`source_fingerprint`.
    """
    if value is ABSENT:
        return "nothing"
    version = vouched(value)
    if version is not None:
        return f"version {version}"
    try:
        digest = source_fingerprint if by_source else fingerprint
        return " ".join(_word(part, digest) for part in _parts(value))
    except UntoldError as exc:
        if not place:
            raise
        raise UntoldError(f"{place}.{shown(name)} is not torch's, and {exc}", value) from exc


def _word(value: object, digest: Callable[[object], str]) -> str:
    if isinstance(value, _NATIVE):
        owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
        home = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
        return f"{home.__name__}.{value.__name__}"
    if isinstance(value, types.FunctionType) and internals.has_code_of_torch(value):
        code = value.__code__
        file = code.co_filename.removeprefix(internals.torch_directory())
        cells = [content_of(cell) for cell in value.__closure__ or ()]
        held = [*cells, value.__defaults__, value.__kwdefaults__]
        plain = ", ".join(_plain(each) for each in held)
        return f"{file}:{code.co_firstlineno}:{code.co_name}:{code_digest(code)}({plain})"
    if internals.is_operator(value):
        return str(value)
    if isinstance(value, partial):
        named = {k: v for k, v in value.keywords.items() if isinstance(v, _PLAIN)}
        return f"partial {[v for v in value.args if isinstance(v, _PLAIN)]} {sorted(named.items())}"
    if isinstance(value, (*_HOLDERS, property, functools._lru_cache_wrapper)):
        return type(value).__name__
    if isinstance(value, types.ModuleType) and not home_of(value).is_named:
        raise UntoldError(f"the module {value.__name__} may have anything in it")
    return digest(whole(value) if isinstance(value, type) else value)


def _plain(value: object, depth: int = 0) -> str:
    """What a function of torch's has been given, as far as it is told by its value.

    Raises:
        UntoldError: it is nested too deep, which what holds itself is, or has too much in it.
    """
    if isinstance(value, (*_PLAIN, enum.Enum)) or internals.is_operator(value):
        return str(value) if isinstance(value, enum.Enum) else repr(value)
    if not isinstance(value, (list, tuple, set, frozenset, dict)):
        return str(value) if internals.is_dtype(value) else type(value).__name__
    if depth == _MAX_DEPTH:
        raise UntoldError("refers to too much")
    items = chain.from_iterable(value.items()) if isinstance(value, dict) else value
    words = [_plain(each, depth + 1) for each in items]
    if sum(map(len, words)) > _MAX_CHARS:
        raise UntoldError("refers to too much")
    if isinstance(value, (set, frozenset)):
        words.sort()
    return f"{type(value).__name__}({', '.join(words)})"


def shown(name: object) -> str:
    return name if isinstance(name, str) else str(name)
