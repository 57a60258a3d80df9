"""Identify code that is not torch's, without looking into what it does.

Code that generates code is identified by its own ``uuid()``, by the version that it was registered
with, or by the distribution that installed it, that one's version and a digest of the source file.
What has none of these has no identity. Code that only takes part in tracing needs none at the
second level, where the traced graph is in the key: there, :func:`rough_identity` helps to tell
programs apart, and never refuses.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from s3cache.graph._results import RegisteredVersion, qualified_name
from s3cache.torch_api import internals

NATIVE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_CONTAINERS = (list, tuple, set, frozenset, dict)
_CONSTANTS = frozenset({"device", "dtype", "layout", "memory_format", "Size"})
_MAX_DEPTH = 8
_MAX_PARTS = 10_000


class UnidentifiedError(Exception):
    """Nothing says which code it is.

    Attributes:
        about: the function, class or object that has no identity.
    """

    def __init__(self, message: str, about: object = None) -> None:
        super().__init__(message)
        self.about = about


def identity(value: object, registered_version: RegisteredVersion = lambda _: None) -> str:
    """Return a text that is equal in another process only for the same code.

    Args:
        value: a function, class, or object, or a container of some.

    Raises:
        UnidentifiedError: some code in it has no identity; says which.
    """
    return _Identifier(registered_version, strict=True).of(value)


def rough_identity(value: object, registered_version: RegisteredVersion = lambda _: None) -> str:
    """Return the same without the state that the code keeps, and never refuse.

    Code of no distribution has the digest of its source file. A wrapper that counts its calls is
    the same before and after.
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
        if isinstance(value, _PLAIN):
            return repr(value) if self._strict else ""
        version = self._registered_version(value)
        if version is not None:
            return f"version {version}"
        uuid = _uuid_of(value)
        if uuid is not None:
            return f"{type(value).__module__}.{type(value).__qualname__} {uuid!r}"
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
        kind, code = origin_of(function).kind, function.__code__
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
        """Return the name of code with what says which version of it is there."""
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
    """Return the kind of something that wraps code, and all that it wraps."""
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
    """Return what a program may have put into an object of torch's; the rest is torch's state."""
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
    """Return what an object says of its own code, as passes of torch do; ``None`` if nothing."""
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
    """Return the digest of a file, or ``""``; it is read once, as Python has."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:32]
    except OSError:
        return ""


def content_of(cell: types.CellType) -> object:
    """Return what a variable of a closure is bound to; ``None`` if to nothing yet."""
    try:  # a thousand times for each key, where suppress() would take longer than all else
        return cell.cell_contents
    except ValueError:
        return None


def code_fingerprint(code: types.CodeType) -> str:
    """Return a digest of compiled Python code by itself, its name and those of its variables."""
    names = (code.co_name, *code.co_varnames, *code.co_freevars)
    return hashlib.sha256(repr((names, code_digest(code))).encode()).hexdigest()[:32]


def code_digest(code: types.CodeType) -> str:
    """Return a digest of compiled code, less its place in a file and names of its variables.

    Names of arguments are in it, as callers give them by name.
    """
    words: list[object] = [
        code.co_code.hex(),
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount],
        code.co_flags,
        len(code.co_varnames),
        getattr(code, "co_exceptiontable", b"").hex(),
        code.co_names,
        [_constant_text(constant) for constant in code.co_consts],
    ]
    return hashlib.sha256(repr(words).encode(errors="surrogatepass")).hexdigest()[:32]


def _constant_text(value: object) -> str:
    """Return the text of a constant in code: the order of a frozen set differs by process."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant_text, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_constant_text, value))}"
    return f"{type(value).__name__} {value!r}"


# -- where code comes from


# Libraries that torch builds on: their versions say what their code is.
_VERSIONED = ("numpy", "scipy", "sympy", "mpmath")


class Origin(NamedTuple):
    """Where code comes from.

    Attributes:
        kind: who wrote it.
        name: of the library or the module; for a library with a digest of all its files.
    """

    kind: Literal["torch", "python", "library", "user"]
    name: str = ""

    @property
    def is_versioned(self) -> bool:
        """Whether versions in the key say what the code is."""
        if self.kind == "library":
            return self.name.partition(" ")[0] in _VERSIONED
        return self.kind in ("torch", "python")


_USER = Origin("user")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what a class statement makes


def origin_of(value: object) -> Origin:
    """Return the origin of a function, a class, a module, or a function in C."""
    if isinstance(value, types.FunctionType):
        return _origin_of_function(value)
    if isinstance(value, types.ModuleType):
        return _origin_of_module(value)
    if isinstance(value, type):
        return _origin_of_class(value)
    module = getattr(value, "__module__", None)
    if isinstance(module, str):
        return _origin_of_name(module)
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    if isinstance(owner, types.ModuleType):
        return _origin_of_name(owner.__name__)
    return _origin_of_class(owner if isinstance(owner, type) else type(owner))


def _origin_of_function(function: types.FunctionType) -> Origin:
    path = function.__code__.co_filename
    if not path.startswith("<") or path.startswith("<frozen "):
        return origin_of_file(path)
    # Libraries generate code, too, in their own namespaces.
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    if module is not None and vars(module) is function.__globals__:
        origin = _origin_of_module(module)
        return origin if origin.kind == "library" else _USER
    return _USER


def _origin_of_class(kind: type) -> Origin:
    """Return the origin that a class claims if it is found there, or was made in C."""
    module: object = kind.__module__
    if not isinstance(module, str):  # Cython's metatype has a descriptor there
        return _USER
    origin = _origin_of_name(module)
    in_c = not kind.__flags__ & _HEAP_TYPE or type(kind).__name__ == "pybind11_type"
    if origin.kind == "user" or in_c:
        return origin
    found: object = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return origin if found is kind else _USER


def _origin_of_name(name: str) -> Origin:
    module = sys.modules.get(name)
    if module is not None:
        return _origin_of_module(module)
    root = name.partition(".")[0]
    if root != name:
        return _origin_of_name(root)
    return Origin("python", name) if root in sys.stdlib_module_names else _USER


def _origin_of_module(module: types.ModuleType) -> Origin:
    name = str(module.__name__)
    file = getattr(module, "__file__", None)
    if isinstance(file, str) and os.path.isabs(file):
        return origin_of_file(file)
    if name.partition(".")[0] == "torch":  # torch.ops, and what torch's native libraries make
        return Origin("torch")
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return Origin("python", name)
    return _USER


@functools.lru_cache(maxsize=8192)
def origin_of_file(path: str) -> Origin:
    """Return the origin of a source file, or a native library."""
    if path.startswith("<frozen "):
        return Origin("python", path[len("<frozen ") : -1])
    if path.startswith((internals.torch_directory(), _OWN)):  # our hooks do what torch does
        return Origin("torch")
    if not os.path.isabs(path):
        return _USER
    for site in _sites(tuple(sys.path)):
        if path.startswith(site):
            return _library(site, distribution_of(path))
    for root in _standard():
        if path.startswith(root):
            name = path[len(root) :].removeprefix("lib-dynload" + os.sep).partition(".")[0]
            return Origin("python", name.replace(os.sep, "."))
    return _USER


#: Where a hook keeps the function that it replaced.
ORIGINAL_ATTR = "_s3cache_original"


def unwrap_patch(value: object) -> object:
    """Return what a hook of s3cache replaced; ``value``, if it is none."""
    while isinstance(value, types.FunctionType) and ORIGINAL_ATTR in vars(value):
        value = vars(value)[ORIGINAL_ATTR]
    return value


def distribution_of(path: str) -> str:
    """Return the top package or module of an installed library that has a file, or ``""``."""
    for site in _sites(tuple(sys.path)):
        if path.startswith(site):
            return path[len(site) :].partition(os.sep)[0].partition(".")[0]
    return ""


@functools.lru_cache(maxsize=64)  # to ask where libraries are installed takes 0.3 ms
def _sites(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return directories with installed libraries, each with a separator at its end."""
    schemes = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = [path for path in (*schemes, *paths) if path.endswith("-packages")]
    return tuple(dict.fromkeys(os.path.abspath(path) + os.sep for path in found))


@functools.cache
def _standard() -> tuple[str, ...]:
    schemes = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    schemes.append(os.path.dirname(os.__file__))
    return tuple(dict.fromkeys(path + os.sep for path in schemes))


@functools.cache
def _library(site: str, package: str) -> Origin:
    """Return the distribution that recorded ``package`` as installed, or the user."""

    def is_other(record: Path) -> bool:  # a distribution of the same name comes first
        name = record.parent.name.partition("-")[0].lower()
        return name != package.lower().replace("-", "_")

    for record in sorted(sorted(Path(site).glob("*.dist-info/RECORD")), key=is_other):
        try:
            lines = record.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        # Compiled files are not recorded on every machine, nor in the same way.
        listed = [line for line in lines if line.startswith((f"{package}/", f"{package},"))]
        listed = sorted(line for line in listed if ".pyc," not in line)
        if listed:
            name, _, version = record.parent.stem.partition("-")
            digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:32]
            return Origin("library", f"{package} {name} {version} {digest}")
    return _USER
