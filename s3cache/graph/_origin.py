"""Find the origin of code: torch, Python, an installed library, or the user.

:func:`origin_of` decides by the file of the code, not by its attributes. :func:`is_third_party`
asks less of a value that is in torch, where torch and its libraries put functions of many kinds.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, cast

import _s3cache_process
from s3cache.torch_api import internals
from s3cache.util.snapshot import content_of

#: Wrappers of functions in a class.
HOLDERS = (staticmethod, classmethod)
#: Functions in C.
NATIVE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)

# Libraries that torch builds on: their versions identify their code.
_VERSIONED = ("numpy", "scipy", "sympy", "mpmath")
# More of them: its modules import their functions and classes.
_BUILT_ON = frozenset(
    """
    cuda expecttest filelock fsspec functorch jinja2 markupsafe mpmath networkx numpy optree
    packaging psutil pybind11 setuptools sympy torchgen tqdm triton typing_extensions
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement
_MAX_DEPTH = 8


class Origin(NamedTuple):
    """The origin of code.

    ``name`` is a module; or a package, with the version and a digest of all files of a library.
    """

    kind: Literal["torch", "python", "library", "user"]
    name: str = ""

    @property
    def is_versioned(self) -> bool:
        """Whether versions in the key identify the code."""
        is_versioned = self.kind == "library" and self._package in _VERSIONED
        return is_versioned or self.kind in ("torch", "python")

    @property
    def is_built_on(self) -> bool:
        """Whether torch has it in its own modules."""
        return self.is_versioned or self._package in _BUILT_ON

    @property
    def _package(self) -> str:
        return self.name.partition(" ")[0].partition(".")[0]


def origin_of(value: object) -> Origin:
    """Return the origin of a function, a class, a module, or a function in C."""
    if isinstance(value, types.FunctionType):
        path, module = value.__code__.co_filename, module_of(value)
        if not _is_generated(path):
            return origin_of_file(path)
        # Libraries also generate code in their own namespaces.
        origin = Origin("user") if module is None else _origin_of_module(module)
        return origin if origin.kind == "library" else Origin("user")
    if isinstance(value, types.ModuleType):
        return _origin_of_module(value)
    if not isinstance(value, type):
        name = getattr(value, "__module__", None)
        owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
        if not isinstance(name, str) and isinstance(owner, types.ModuleType):
            name = owner.__name__
        if isinstance(name, str):
            return _origin_of_name(name)
        value = owner if isinstance(owner, type) else type(owner)
    # A class has the origin that it names, if it exists there or was made in C.
    name = value.__module__
    origin = _origin_of_name(name)
    in_c = not value.__flags__ & _HEAP_TYPE or type(value).__name__ == "pybind11_type"
    if origin.kind == "user" or in_c or value_at(name, value.__qualname__) is value:
        return origin
    return Origin("user")


def value_at(module: str, name: str) -> object:
    """Return the object with a qualified name in an imported module, or None."""
    value: object = sys.modules.get(module)
    for segment in name.split("."):
        value = getattr(value, "__dict__", {}).get(segment)
    return value


def module_of(function: types.FunctionType) -> types.ModuleType | None:
    """Return the module in which a function runs, if it is imported."""
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    return None if module is None or vars(module) is not function.__globals__ else module


def _is_generated(path: str) -> bool:
    return path.startswith("<") and not path.startswith("<frozen ")


def _origin_of_name(name: object) -> Origin:
    """Return the origin of the module with a name, or of its package; of the user for others."""
    if not isinstance(name, str):  # a descriptor, for Cython's metatype
        return Origin("user")
    module, root = sys.modules.get(name), name.partition(".")[0]
    if module is not None:
        return _origin_of_module(module)
    if root != name:
        return _origin_of_name(root)
    return Origin("python" if root in sys.stdlib_module_names else "user", name)


def _origin_of_module(module: types.ModuleType) -> Origin:
    name, file = str(module.__name__), getattr(module, "__file__", None)
    if isinstance(file, str) and os.path.isabs(file):
        origin = origin_of_file(file)
        return Origin("user", name) if origin.kind == "user" else origin
    if name.partition(".")[0] == "torch":  # torch.ops, and modules of torch's native libraries
        return Origin("torch")
    is_python = name in sys.builtin_module_names or name in sys.stdlib_module_names
    return Origin("python" if is_python else "user", name)


@functools.lru_cache(maxsize=8192)
def origin_of_file(path: str) -> Origin:
    """Return the origin of a source file, or a native library."""
    if path.startswith("<frozen "):
        return Origin("python", path[len("<frozen ") : -1])
    if path.startswith((internals.torch_directory(), _OWN)):  # our hooks behave like torch
        return Origin("torch")
    for site in _sites(tuple(sys.path)):
        if path.startswith(site):
            return _library(site, path[len(site) :].partition(os.sep)[0].partition(".")[0])
    for root in _standard():
        if path.startswith(root):
            name = path[len(root) :].removeprefix("lib-dynload" + os.sep).partition(".")[0]
            return Origin("python", name.replace(os.sep, "."))
    return Origin("user")


@functools.lru_cache(maxsize=64)  # finding the directories takes 0.3 ms
def _sites(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return directories with installed libraries, with a separator at the end."""
    schemes = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    sites = [
        path
        for path in (*schemes, *paths)
        if path.endswith("-packages") or (path and any(Path(path).glob("*.dist-info")))
    ]
    return tuple(dict.fromkeys(os.path.abspath(path) + os.sep for path in sites))


@functools.cache
def _standard() -> tuple[str, ...]:
    schemes = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
    return tuple(dict.fromkeys(path + os.sep for path in (*schemes, os.path.dirname(os.__file__))))


def is_as_installed(path: str) -> bool:
    """Return False if a file of an installed library has been edited where it is installed.

    Only a file that is newer than the list of installed files, which has its digest, is read.
    """
    for site in _sites(tuple(sys.path)):
        if path.startswith(site):
            place = path[len(site) :].replace(os.sep, "/")
            record, files = _installed(site, place.partition("/")[0].partition(".")[0])
            if place not in files:
                return True
            expected, size = files[place]
            try:
                file, recorded_ns = os.stat(path), os.stat(record).st_mtime_ns
                if file.st_size != size or file.st_mtime_ns <= recorded_ns:
                    return file.st_size == size
                digest = hashlib.sha256(Path(path).read_bytes()).digest()
            except OSError:
                return True
            return base64.urlsafe_b64encode(digest).decode().rstrip("=") == expected
    return True


@functools.cache
def _installed(site: str, package: str) -> tuple[Path, dict[str, tuple[str, int]]]:
    """Return the list of the files of a package, and their digests and sizes by place."""
    if (found := _record_of(site, package)) is None:
        return Path(), {}
    record, listed = found
    rows = (line.decode(errors="replace").rsplit(",", 2) for line in listed)
    files = {
        place.strip('"'): (recorded.removeprefix("sha256="), int(size))
        for place, recorded, size in rows
        if recorded.startswith("sha256=") and size.isdecimal()
    }
    return record, files


@functools.cache
def _library(site: str, package: str) -> Origin:
    """Return the distribution that recorded ``package`` as installed, or the user."""
    found = _record_of(site, package)
    return Origin("user", package) if found is None else _distribution(found[0], package, found[1])


@functools.cache
def _record_of(site: str, package: str) -> tuple[Path, list[bytes]] | None:
    """Return the list of files of the distribution with ``package``, and its lines about that."""
    own = package.lower().replace("-", "_")
    try:
        changed_ns = os.stat(site).st_mtime_ns
    except OSError:  # code may name the file of another machine
        return None
    records = _records(site, changed_ns)
    # A distribution of the same name is the first. Reading all lists takes long.
    named = [each for each in records if each.parent.name.lower().partition("-")[0] == own]
    for record in named:
        if listed := _lines_about(record, package):
            return record, listed
    for record in _owners(site, changed_ns).get(package, ()):
        if listed := _lines_about(record, package):
            return record, listed
    return None


@functools.lru_cache(maxsize=64)
def _records(site: str, changed_ns: int) -> list[Path]:
    """Return the lists of files of the distributions in a directory, as of its last change."""
    return sorted(Path(site).glob("*.dist-info/RECORD"))


@functools.lru_cache(maxsize=64)
def _owners(site: str, changed_ns: int) -> dict[str, list[Path]]:
    """Return the lists of files with a package or a module in them, by its name."""
    records: dict[str, list[Path]] = {}
    for record in _records(site, changed_ns):
        first = {line.partition(b"/")[0] for line in _lines(record)}  # few, of many lines
        for name in {part.partition(b",")[0].decode() for part in first}:
            records.setdefault(name, []).append(record)
    return records


def _lines(record: Path) -> list[bytes]:
    try:
        return record.read_bytes().splitlines()
    except OSError:
        return []


def _lines_about(record: Path, package: str) -> list[bytes]:
    """Return the lines about the files of a package, without compiled files.

    Machines record these differently, or not at all.
    """
    starts = f"{package}/".encode(), f"{package},".encode()
    own = (line for line in _lines(record) if line.startswith(starts))
    return sorted(line for line in own if b".pyc," not in line)


def _distribution(record: Path, package: str, listed: Iterable[bytes]) -> Origin:
    name, _, version = record.parent.stem.partition("-")
    digest = hashlib.sha256(b"\n".join(listed)).hexdigest()[:32]
    return Origin("library", f"{package} {name} {version} {digest}")


# -- is a value in torch torch's own?


def is_code(value: object) -> bool:
    """Return True for a callable, and for an object that runs code when it is read."""
    return callable(value) or isinstance(value, (*HOLDERS, property, *NATIVE))


def is_third_party(value: object, *, surveyed: bool = False) -> bool:
    """Return True if ``value`` visibly has code of others than torch, and what it builds on.

    If it is ``surveyed``, anonymous code that was compiled from text counts as torch's: the value
    may have been there since ``import torch``.
    """
    if isinstance(value, (*NATIVE, types.ModuleType)) or not is_code(value):
        return False
    return any(not _is_built_on(part, surveyed) for part in parts_of(value))


_torch_rules: dict[int, object] = {}  # by id; kept alive


def is_third_party_rule(rule: object, inner: Iterable[object] = ()) -> bool:
    """Return the same for a registered function and functions in it.

    It remembers torch's own: there are thousands, which are permanent.
    """
    if id(rule) in _torch_rules:
        return False
    if is_third_party(rule) or any(map(is_third_party, inner)):
        return True
    _torch_rules[id(rule)] = rule
    return False


def third_party_parts(value: object) -> list[object]:
    """Return ``value`` and the functions that it wraps, if they are not torch's."""
    parts = list(parts_of(value))
    if all(map(_is_built_on, parts)):
        return []
    return [part for part in parts if isinstance(part, partial) or not _is_built_on(part)]


def _is_built_on(value: object, surveyed: bool = False) -> bool:
    if isinstance(value, (*HOLDERS, property, functools._lru_cache_wrapper)):
        return True  # its parts decide
    if type(value).__module__ == "unittest.mock":
        return False  # the behaviour of such an object is not in its code
    if not isinstance(value, (types.FunctionType, type, *NATIVE)):
        called: object = getattr(type(value), "__call__", None)  # noqa: B004 - to see its code
        value = called if isinstance(called, types.FunctionType) else type(value)
    if isinstance(value, type):
        return _is_built_on_module(value.__module__)
    if not isinstance(value, types.FunctionType):
        return origin_of(value).is_versioned
    path, module = value.__code__.co_filename, module_of(value)
    if not _is_generated(path):
        root = "" if module is None else module.__name__.partition(".")[0]
        return root in _BUILT_ON or origin_of_file(path).is_built_on
    if module is not None:  # torch compiles code from text
        return _is_built_on_module(module.__name__)
    name = value.__globals__.get("__name__")
    has_no_module = name is None or str(name).startswith("namedtuple_")
    return (surveyed and has_no_module) or value in internals.generated_operations()


def _is_built_on_module(name: object) -> bool:
    # Some modules are not in an installation record. To look for others takes long.
    return str(name).partition(".")[0] in _BUILT_ON or _origin_of_name(name).is_built_on


def parts_of(value: object) -> Iterator[object]:
    """Yield ``value`` and all functions that it wraps, without duplicates, outermost first."""
    yield value
    seen, level = {id(value)}, _wrapped(value)
    for _ in range(_MAX_DEPTH):
        inner = {id(part): part for part in level if id(part) not in seen}
        if not inner:
            return
        yield from inner.values()
        seen |= inner.keys()
        level = [part for outer in inner.values() for part in _wrapped(outer)]


def _wrapped(value: object) -> list[object]:
    """Return the functions in a function's closure, or in a wrapper of code."""
    inner = [*(wrapped_parts(value) or ())]
    if isinstance(value, types.FunctionType):
        inner = [content_of(cell) for cell in value.__closure__ or ()]
    elif isinstance(value, partial):
        inner += value.keywords.values()
    return [part for part in inner if callable(part) and not isinstance(part, type)]


def wrapped_parts(value: object) -> Iterable[object] | None:
    """Return everything that a wrapper of code wraps; None for other objects."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, functools.cached_property):
        return (value.func,)
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if isinstance(value, partial):
        parts = value.func, *value.args, *sorted(value.keywords.items())
        return (*parts, vars(value)) if vars(value) else parts
    return None


#: The attribute of a hook with the function that it replaced.
ORIGINAL_ATTR = "_s3cache_original"


def unwrap_patch(value: object) -> object:
    """Return the original if ``value`` is a hook of s3cache; otherwise ``value``."""
    while isinstance(value, types.FunctionType) and ORIGINAL_ATTR in vars(value):
        value = vars(value)[ORIGINAL_ATTR]
    return value


# -- operators


def is_torch_operator(value: object) -> bool:
    """Return True for an operator of torch, or for a namespace or name with one.

    The file that defines it decides, not the namespace. Decompositions and fallbacks reach
    operators that no graph names.
    """
    kind = internals.kind_of_operator(value)
    if kind == "higher-order":
        return origin_of(type(value)).kind == "torch"
    if kind == "namespace":
        members = vars(value).values()
        packets = (member for member in members if internals.kind_of_operator(member) == "packet")
        return any(map(is_torch_operator, packets))
    name = value if isinstance(value, str) else internals.full_name(value)
    return "::" not in name or name.startswith("aten::") or _is_defined_by_torch(name)


def is_third_party_operator(value: object) -> bool:
    """Return True for an overload that others define: its rules affect only graphs with it."""
    return internals.kind_of_operator(value) == "overload" and not is_torch_operator(value)


@functools.cache
def _is_defined_by_torch(name: str) -> bool:
    defined = internals.DEFINED_AT.search(internals.dispatch_dump.get()(name))
    if defined is None:
        return False
    if registers_for_others(defined[1]):
        definition = internals.custom_operators.get().get(name)
        # torch.library.triton_op wraps the user's function in its own.
        return definition is not None and not third_party_parts(definition._init_fn)
    built_in = internals.built_in()
    home = internals.torch_directory()
    return defined[1].startswith((home, built_in) if built_in else home)


def registers_for_others(path: str) -> bool:
    """Return True for files of torch that register functions of programs."""
    home = internals.torch_directory()
    return path.startswith((f"{home}library.py", f"{home}_library{os.sep}"))


# -- values in torch's modules that are not code

SCALARS: tuple[type, ...] = (str, bytes, int, bool, float, complex, type(None))


@functools.cache  # called for each of fifty thousand values
def kinds_of_values() -> tuple[type, ...]:
    """Return the types of constants, and of containers of them."""
    return (*SCALARS, tuple, frozenset, dict, list, set, internals.ordered_set.get())


def is_plain(value: object) -> bool:
    """Return True if the text of `value` describes it completely."""
    is_scalar = type(value) in SCALARS
    return is_scalar or internals.is_dtype(value) or internals.is_operator(value)


def is_constant(value: object) -> bool:
    """Return True for values of tables that torch does not write to after its import."""
    return (
        type(value) in kinds_of_values()
        or is_plain(value)
        or isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
    )


def is_same_value(old: object, new: object, depth: int = 0) -> bool:
    """Return True if two constants are the same, without their own `==`; 1 is not True."""
    if old is new:
        return True
    kind = type(old)
    too_deep = depth > _s3cache_process.MAX_DEPTH
    if kind is not type(new) or kind not in kinds_of_values() or too_deep:
        return False
    if isinstance(old, SCALARS):
        return old == new
    olds, news = (
        [*table, *table.values()] if isinstance(table, dict) else [*cast("Iterable[object]", table)]
        for table in (old, new)
    )
    return len(olds) == len(news) and all(
        is_same_value(*pair, depth + 1) for pair in zip(olds, news, strict=True)
    )
