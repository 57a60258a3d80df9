"""Identify code that is not torch's, without analysing its behaviour.

Code that generates code is identified by its own ``uuid()``, or by its registered version.
Otherwise its distribution identifies it, with the version and a digest of the source file. Code
without any of these has no identity. Code that only takes part in tracing needs none at the second
level, where the traced graph is in the key. There :func:`rough_identity` helps to tell programs
apart, and never refuses.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
import tempfile
import types
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import cast

import _s3cache_process
from s3cache.graph._origin import NATIVE, is_code, is_plain, kinds_of_tables, origin_of
from s3cache.graph._results import RegisteredVersion, qualified_name
from s3cache.torch_api import internals
from s3cache.util.snapshot import ABSENT, CALLS, code_digest, constant_text, content_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_CONTAINERS = (list, tuple, set, frozenset, dict)
_CONSTANTS = frozenset({"device", "dtype", "layout", "memory_format", "Size"})
_MAX_DEPTH = 8
_MAX_PARTS = 10_000


class UnidentifiedError(Exception):
    """Some code has no identity."""

    def __init__(self, message: str, about: object = None) -> None:
        super().__init__(message)
        self.about = about  # the function, class or object that has no identity


def identity(value: object, registered_version: RegisteredVersion = lambda _: None) -> str:
    """Return a text that is equal in another process only for the same code.

    Raises:
        UnidentifiedError: some code in ``value`` has no identity; the error names it.
    """
    return _Identifier(registered_version, strict=True).of(value)


def rough_identity(value: object, registered_version: RegisteredVersion = lambda _: None) -> str:
    """Return the same without the state of the code, and never refuse.

    Code outside of distributions is identified by the digest of its source file. A wrapper that
    counts its calls has the same text before and after.
    """
    return _Identifier(registered_version, strict=False).of(value)


class _Identifier:
    def __init__(self, registered_version: RegisteredVersion, *, strict: bool) -> None:
        self._registered_version = registered_version
        self._strict = strict
        self._left = _MAX_PARTS

    def of(self, value: object, depth: int = 0) -> str:
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            return self._refuse("refers to too much", value)
        if value is ABSENT:
            return "nothing"
        if isinstance(value, _PLAIN):
            return repr(value) if self._strict else ""
        version = self._registered_version(value)
        if version is not None:
            return f"version {version}"
        uuid = _uuid_of(value)
        if uuid is not None:
            return f"{type(value).__module__}.{type(value).__qualname__} {constant_text(uuid)}"
        if type(value) is internals.ordered_set.get():
            value = list(internals.inside_of_ordered_set(value))
        if isinstance(value, _CONTAINERS):
            return self._container(value, depth)
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        wrapped = _wrapped(value)
        if wrapped is not None:
            return self._all(*wrapped, depth)
        if internals.is_operator(value) or isinstance(value, enum.Enum):
            return f"{type(value).__qualname__} {value}"
        if isinstance(value, types.ModuleType):
            return self._located(f"module {value.__name__}", value)
        if isinstance(value, type):
            return self._located(f"{value.__module__}.{value.__qualname__}", value)
        if isinstance(value, NATIVE):
            owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
            owner = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
            return self._located(f"{owner.__name__}.{value.__name__}", value)
        return self._object(value, depth)

    def _all(self, kind: str, values: Iterable[object], depth: int) -> str:
        return f"{kind}({', '.join(self.of(each, depth + 1) for each in values)})"

    def _container(self, value: object, depth: int) -> str:
        kind = type(value).__name__
        if not self._strict:
            return kind
        if isinstance(value, dict):
            return self._all(kind, value.items(), depth)
        assert isinstance(value, (list, tuple, set, frozenset))
        texts = [self.of(item, depth + 1) for item in value]
        if isinstance(value, (set, frozenset)):
            texts.sort()
        return f"{kind}({', '.join(texts)})"

    def _function(self, function: types.FunctionType, depth: int) -> str:
        kind, code = origin_of(function).kind, CALLS.own_code(function)
        if kind == "torch":
            file = code.co_filename.removeprefix(internals.torch_directory())
            text = f"{file}:{code.co_firstlineno}:{code.co_name}:{code_digest(code)}"
        else:
            name = f"{function.__qualname__}:{code.co_firstlineno}"
            text = self._located(name, function, code.co_filename)
        if kind == "user":
            text = f"{text} {code_digest(code)}"
        held = [content_of(cell) for cell in function.__closure__ or ()]
        given = (*held, function.__defaults__, function.__kwdefaults__)
        return self._all(text, given, depth) if any(each is not None for each in given) else text

    def _located(self, name: str, value: object, file: str = "") -> str:
        """Return the name of code, with the origin that determines its version."""
        origin, file = origin_of(value), file or _file_of(value)
        if origin.kind in ("torch", "python"):
            return f"{origin.kind} {name}"
        if origin.kind == "library":
            return f"{origin.name} {_digest_of_file(file)} {name}"
        what = f"is {qualified_name(value)} of {file or 'no file'}"
        refused = self._refuse(f"{what}, which no installed distribution has", value)
        return refused or f"{_digest_of_file(file)} {name}"

    def _object(self, value: object, depth: int) -> str:
        import torch

        kind = type(value)
        if kind.__module__ == "torch" and kind.__name__ in _CONSTANTS:
            return str(value)
        text = self.of(kind, depth + 1)
        if not self._strict:
            return text
        state = getattr(value, "__dict__", None)
        is_tensor = isinstance(value, (torch.Tensor, torch.nn.Module))
        if origin_of(kind).kind == "torch" and not is_tensor:
            return text if state is None else self._all(text, [_constants_and_code(state)], depth)
        if state is None or kind.__module__ == "unittest.mock" or is_tensor:
            raise UnidentifiedError(f"holds a {qualified_name(value)}", value)
        return self._all(text, [state], depth)

    def _refuse(self, message: str, value: object) -> str:
        if self._strict:
            raise UnidentifiedError(message, value)
        return ""


def _wrapped(value: object) -> tuple[str, Iterable[object]] | None:
    """Return the kind of a wrapper of code, and everything that it wraps; None for others."""
    if isinstance(value, types.MethodType):
        return "method", (value.__func__, value.__self__)
    if isinstance(value, (staticmethod, classmethod)):
        return type(value).__name__, (value.__func__,)
    if isinstance(value, property):
        return "property", (value.fget, value.fset, value.fdel)
    if isinstance(value, functools._lru_cache_wrapper):
        return "lru_cache", (value.__wrapped__,)
    if isinstance(value, partial):
        return "partial", (value.func, *value.args, *sorted(value.keywords.items()))
    return None


def _constants_and_code(state: dict[str, object]) -> dict[str, object]:
    """Return the attributes of torch's object that a program may have set; others are state."""
    code = types.FunctionType, types.MethodType, partial
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, code) or _is_constant(value, 0)
    }


def _is_constant(value: object, depth: int) -> bool:
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        return depth < _MAX_DEPTH and all(_is_constant(item, depth + 1) for item in items)
    return isinstance(value, (*_PLAIN, enum.Enum)) or internals.is_dtype(value)


def _uuid_of(value: object) -> object:
    """Return the ``uuid()`` of an object, such as a pass for torch; ``None`` if it has none."""
    uuid = getattr(type(value), "uuid", None)
    if isinstance(value, type) or not isinstance(uuid, types.FunctionType):
        return None
    found = value.uuid()  # type: ignore[attr-defined]
    return found if found and isinstance(found, (str, bytes, int, tuple)) else None


def _file_of(value: object) -> str:
    name = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", None)
    file = getattr(sys.modules.get(str(name)), "__file__", None)
    return file if isinstance(file, str) else ""


@functools.lru_cache(maxsize=4096)
def _digest_of_file(path: str) -> str:
    """Return the digest of a file, or ``""``; read it once, like Python does."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:32]
    except OSError:
        return ""


def code_fingerprint(code: types.CodeType) -> str:
    """Return a digest of compiled Python code, including its name and names of variables."""
    names = (code.co_name, *code.co_varnames, *code.co_freevars)
    return hashlib.sha256(repr((names, code_digest(code))).encode()).hexdigest()[:32]


def digest_of(inside: Mapping[object, object]) -> str:
    """Return a digest of names with their constants, functions and classes."""
    texts = [
        f"{_described(name)}={_described(value)}"
        for name, value in inside.items()
        # Some docstrings contain addresses, and so do functions that FX wraps.
        if is_code(value) or not str(name).startswith("__")
        if type(name) is not tuple or id(value) not in name
        if not isinstance(value, types.ModuleType)  # each import adds its own to its package
    ]
    return hashlib.sha256("\n".join(sorted(texts)).encode(errors="surrogatepass")).hexdigest()[:32]


def _described(value: object, depth: int = 0) -> str:
    """Return a text without addresses that does not depend on where torch is installed."""
    kind = type(value)
    if isinstance(value, str):
        places = internals.torch_directory()[:-1], tempfile.gettempdir()
        return repr(value.replace(places[0], "<torch>").replace(places[1], "<tmp>"))
    if is_plain(value):
        return str(value)
    if kind in (*kinds_of_tables(), tuple, frozenset) and depth <= _s3cache_process.MAX_DEPTH:
        items = internals.by_name(cast("Collection[object]", value)).items()
        texts = [
            f"{_described(key, depth + 1)}: {_described(each, depth + 1)}"
            for key, each in items
            if type(key) is not tuple or id(each) not in key  # functions to wrap, by address
        ]
        return f"{kind.__name__} {sorted(texts)}"  # torch makes some of them from sets
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, NATIVE):
        return f"{getattr(value, '__module__', None)}.{value.__name__}"  # the name may be shared
    if not isinstance(value, types.FunctionType):
        return kind.__qualname__
    given = f"{_described(value.__defaults__)} {_described(value.__kwdefaults__)}"
    return f"{value.__module__}.{value.__qualname__} {given}"
