"""Whose code is it: torch's, Python's, an installed library's, or the user's.

That is decided by the file that code was compiled from, never by the names that it bears:
``functools.wraps`` gives users' functions names of torch's.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from s3cache.torch_api import internals

__all__ = [
    "ORIGINAL",
    "Home",
    "behind_seam",
    "home_of",
    "home_of_file",
    "installed_as",
    "name_of",
]

# Libraries whose functions and classes are known by their version: what they compute with is C, and
# Inductor computes with some of them itself.
_NAMED = ("numpy", "scipy", "sympy", "mpmath")


class Home(NamedTuple):
    """Where code is from.

    Attributes:
        kind: who answers for it.
        name: of the library or the module; for a library with a digest of all its files.
    """

    kind: Literal["torch", "python", "library", "user"]
    name: str = ""

    @property
    def is_named(self) -> bool:
        """Whether versions say what the code is, so that it need not be looked into."""
        if self.kind == "library":
            return self.name.partition(" ")[0] in _NAMED
        return self.kind in ("torch", "python")


_USER = Home("user")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def home_of(value: object) -> Home:
    """That of a function, a class, a module, or a function in C."""
    if isinstance(value, types.FunctionType):
        return _home_of_function(value)
    if isinstance(value, types.ModuleType):
        return _home_of_module(value)
    if isinstance(value, type):
        return _home_of_class(value)
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        if isinstance(owner, types.ModuleType):
            module = owner.__name__
        else:
            kind = owner if isinstance(owner, type) else type(owner)
            return _home_of_class(kind)
    return _home_of_name(module)


def _home_of_function(function: types.FunctionType) -> Home:
    """That of its code; libraries also generate code, in their own namespaces."""
    path = function.__code__.co_filename
    if not path.startswith("<") or path.startswith("<frozen "):
        return home_of_file(path)
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    if module is not None and vars(module) is function.__globals__:
        home = _home_of_module(module)
        return home if home.kind == "library" else _USER
    return _USER


def _home_of_class(kind: type) -> Home:
    """A class is where it says only if it is found there, or was made in C."""
    module: object = kind.__module__
    if not isinstance(module, str):  # Cython's metatype has a descriptor there
        return _USER
    home = _home_of_name(module)
    in_c = not kind.__flags__ & _HEAP_TYPE or type(kind).__name__ == "pybind11_type"
    if home.kind == "user" or in_c:
        return home
    found: object = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return home if found is kind else _USER


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what a class statement makes


def _home_of_name(name: str) -> Home:
    module = sys.modules.get(name)
    if module is not None:
        return _home_of_module(module)
    root = name.partition(".")[0]
    if root != name:
        return _home_of_name(root)
    return Home("python", name) if root in sys.stdlib_module_names else _USER


def _home_of_module(module: types.ModuleType) -> Home:
    name = str(module.__name__)
    file = getattr(module, "__file__", None)
    root = name.partition(".")[0]
    if isinstance(file, str) and os.path.isabs(file):
        return home_of_file(file)
    if root == "torch":  # torch.ops, and what torch's native libraries make
        return Home("torch")
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return Home("python", name)
    return _USER


@functools.lru_cache(maxsize=8192)
def home_of_file(path: str) -> Home:
    """Whose a source file, or a native library, is."""
    if path.startswith("<frozen "):
        return Home("python", path[len("<frozen ") : -1])
    if path.startswith((internals.torch_directory(), _OWN)):  # seams do what torch does
        return Home("torch")
    if not os.path.isabs(path):
        return _USER
    for site in _sites():
        if path.startswith(site):
            return _home_in(site, installed_as(path))
    for root in _standard():
        if path.startswith(root):
            name = path[len(root) :].removeprefix("lib-dynload" + os.sep).partition(".")[0]
            return Home("python", name.replace(os.sep, "."))
    return _USER


#: Where a seam keeps the function that it stands in front of.
ORIGINAL = "_s3cache_original"


def behind_seam(value: object) -> object:
    """What a seam of s3cache's stands in front of; ``value``, if it is none."""
    while isinstance(value, types.FunctionType) and ORIGINAL in vars(value):
        value = vars(value)[ORIGINAL]
    return value


def installed_as(path: str) -> str:
    """The package or module of an installed library that a file is of; ``""`` if it is of none."""
    for site in _sites():
        if path.startswith(site):
            return path[len(site) :].partition(os.sep)[0].partition(".")[0]
    return ""


def _sites() -> tuple[str, ...]:
    """Directories with installed libraries, each with a separator at its end."""
    return _sites_of(tuple(sys.path))


@functools.lru_cache(maxsize=64)  # to ask where libraries are installed takes 0.3 ms
def _sites_of(paths: tuple[str, ...]) -> tuple[str, ...]:
    schemes = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = [path for path in (*schemes, *paths) if path.endswith("-packages")]
    return tuple(dict.fromkeys(os.path.abspath(path) + os.sep for path in found))


@functools.cache
def _standard() -> tuple[str, ...]:
    schemes = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    schemes.append(os.path.dirname(os.__file__))
    return tuple(dict.fromkeys(path + os.sep for path in schemes))


@functools.cache
def _home_in(site: str, top: str) -> Home:
    """The library that has installed ``top``; the user's where none says so."""
    package = top.partition(".")[0]
    for record in _records(site, package):
        lines = [line for line in _lines(record) if line.startswith((f"{package}/", f"{top},"))]
        # What is compiled from it is not there everywhere, nor is it recorded the same way.
        lines = sorted(line for line in lines if ".pyc," not in line)
        if lines:
            name, _, version = record.parent.stem.partition("-")
            digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
            return Home("library", f"{package} {name} {version} {digest}")
    return _USER


def _records(site: str, package: str) -> Iterator[Path]:
    """Records of what was installed, that of the library of the same name first."""
    records = sorted(Path(site).glob("*.dist-info/RECORD"))
    plain = package.lower().replace("-", "_")
    yield from sorted(records, key=lambda path: path.parent.name.partition("-")[0].lower() != plain)


def _lines(record: Path) -> list[str]:
    try:
        return record.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def name_of(value: object) -> str:
    """How a function, a class or an object's class is called, for messages."""
    home = getattr(value, "__module__", None)
    home = home if isinstance(home, str) else str(type(value).__module__)
    return f"{home}.{getattr(value, '__qualname__', type(value).__qualname__)}"
