"""Find which distribution code comes from: torch, Python, an installed library, or the user.

The file that code was compiled from decides, never the names that it bears: ``functools.wraps``
gives users' functions names of torch's.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Literal, NamedTuple

from s3cache.torch_api import internals

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
