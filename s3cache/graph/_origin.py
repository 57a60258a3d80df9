"""Find the origin of code, and decide whether an object in a namespace of torch is torch's own.

The file of its code decides, not its attributes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, cast

import _s3cache_process
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Operator
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


class Origin(NamedTuple):
    """The origin of code."""

    kind: Literal["torch", "python", "library", "user"]
    name: str = ""  # of the library or the module; for a library with a digest of all its files

    @property
    def is_versioned(self) -> bool:
        """Whether versions in the key identify the code."""
        if self.kind == "library":
            return self.name.partition(" ")[0] in _VERSIONED
        return self.kind in ("torch", "python")


_USER = Origin("user")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


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
    # Libraries also generate code in their own namespaces.
    module = sys.modules.get(str(function.__globals__.get("__name__")))
    if module is not None and vars(module) is function.__globals__:
        origin = _origin_of_module(module)
        return origin if origin.kind == "library" else _USER
    return _USER


def _origin_of_class(kind: type) -> Origin:
    """Return the origin that a class claims, if it exists there or was made in C."""
    module: object = kind.__module__
    if not isinstance(module, str):  # a descriptor, for Cython's metatype
        return _USER
    origin = _origin_of_name(module)
    in_c = not kind.__flags__ & _HEAP_TYPE or type(kind).__name__ == "pybind11_type"
    if origin.kind == "user" or in_c:
        return origin
    return origin if value_at(module, kind.__qualname__) is kind else _USER


def value_at(module: str, name: str) -> object:
    """Return the object with a qualified name in an imported module, or None."""
    found: object = sys.modules.get(module)
    for segment in name.split("."):
        found = getattr(found, "__dict__", {}).get(segment)
    return found


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
    if name.partition(".")[0] == "torch":  # torch.ops, and modules of torch's native libraries
        return Origin("torch")
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return Origin("python", name)
    return _USER


@functools.lru_cache(maxsize=8192)
def origin_of_file(path: str) -> Origin:
    """Return the origin of a source file, or a native library."""
    if path.startswith("<frozen "):
        return Origin("python", path[len("<frozen ") : -1])
    if path.startswith((internals.torch_directory(), _OWN)):  # our hooks behave like torch
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


def is_torch_file(path: str) -> bool:
    """Return whether a source file is one of torch's."""
    return path.startswith(internals.torch_directory())


#: The attribute of a hook with the function that it replaced.
ORIGINAL_ATTR = "_s3cache_original"


def unwrap_patch(value: object) -> object:
    """Return the original if ``value`` is a hook of s3cache; otherwise ``value``."""
    while isinstance(value, types.FunctionType) and ORIGINAL_ATTR in vars(value):
        value = vars(value)[ORIGINAL_ATTR]
    return value


def are_same_method(old: object, new: object) -> bool:
    """Return True if both are the same static or class method, perhaps wrapped by our hook."""
    if not isinstance(old, HOLDERS) or not isinstance(new, HOLDERS):
        return False
    return type(old) is type(new) and unwrap_patch(old.__func__) is unwrap_patch(new.__func__)


def distribution_of(path: str) -> str:
    """Return the top-level package or module of the installed library with a file, or ``""``."""
    for site in _sites(tuple(sys.path)):
        if path.startswith(site):
            return path[len(site) :].partition(os.sep)[0].partition(".")[0]
    return ""


@functools.lru_cache(maxsize=64)  # finding the directories takes 0.3 ms
def _sites(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return directories with installed libraries, with a separator at the end."""
    schemes = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = [
        path
        for path in (*schemes, *paths)
        if path.endswith("-packages") or (path and any(Path(path).glob("*.dist-info")))
    ]
    return tuple(dict.fromkeys(os.path.abspath(path) + os.sep for path in found))


@functools.cache
def _standard() -> tuple[str, ...]:
    schemes = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    schemes.append(os.path.dirname(os.__file__))
    return tuple(dict.fromkeys(path + os.sep for path in schemes))


@functools.cache
def _library(site: str, package: str) -> Origin:
    """Return the distribution that recorded ``package`` as installed, or the user."""

    def is_other(record: Path) -> bool:  # sorts a distribution of the same name first
        name = record.parent.name.partition("-")[0].lower()
        return name != package.lower().replace("-", "_")

    for record in sorted(sorted(Path(site).glob("*.dist-info/RECORD")), key=is_other):
        try:
            lines = record.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        # Machines record compiled files differently, or not at all.
        listed = [line for line in lines if line.startswith((f"{package}/", f"{package},"))]
        listed = sorted(line for line in listed if ".pyc," not in line)
        if listed:
            name, _, version = record.parent.stem.partition("-")
            digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:32]
            return Origin("library", f"{package} {name} {version} {digest}")
    return _USER


# -- is an object torch's own?


# Libraries that torch builds on: its modules import their functions and classes.
_BUILT_ON = frozenset(
    """
    cuda expecttest filelock fsspec functorch jinja2 markupsafe mpmath networkx numpy optree
    packaging psutil pybind11 setuptools sympy torchgen tqdm triton typing_extensions
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
_MAX_DEPTH = 8


def is_code(value: object) -> bool:
    """Return True for a callable, and for an object that runs code when it is read."""
    return callable(value) or isinstance(value, (*HOLDERS, property, *NATIVE))


def is_foreign(value: object, *, surveyed: bool = False) -> bool:
    """Return True if `value` visibly contains code that is not torch's.

    If it is `surveyed`, it may have been there since `import torch`: then anonymous code that was
    compiled from text counts as torch's.
    """
    if isinstance(value, NATIVE):
        return False
    if isinstance(value, type):
        return not _is_of_known_module(value)
    if isinstance(value, types.ModuleType) or not is_code(value):
        return False
    return any(not _is_of_torch(part, surveyed) for part in parts_of(value))


def _is_of_torch(value: object, surveyed: bool = False) -> bool:
    """Return True if it comes from torch, from Python, or from a library that torch builds on."""
    if isinstance(value, (*HOLDERS, property, functools._lru_cache_wrapper)):
        return True  # its parts decide
    if type(value).__module__ == "unittest.mock":
        return False  # the behaviour of such an object is not in its code
    if not isinstance(value, (types.FunctionType, *NATIVE)):
        called: object = getattr(type(value), "__call__", None)  # noqa: B004 - to see its code
        value = called if isinstance(called, types.FunctionType) else type(value)
    if not isinstance(value, types.FunctionType):
        return origin_of(value).is_versioned or (
            isinstance(value, type) and _is_of_known_module(value)
        )
    file = value.__code__.co_filename
    if _is_known_file(file):
        return True
    module = sys.modules.get(str(value.__globals__.get("__name__")))
    if module is not None and vars(module) is value.__globals__:
        # Some modules are not in an installation record, and torch compiles code from text.
        root = module.__name__.partition(".")[0]
        return root in _BUILT_ON or (file.startswith("<") and origin_of(module).is_versioned)
    name = value.__globals__.get("__name__")
    has_no_module = name is None or str(name).startswith("namedtuple_")
    is_made_of_text = surveyed and file.startswith("<") and has_no_module
    return is_made_of_text or value in internals.generated_operations()


@functools.cache
def _is_known_file(file: str) -> bool:
    if file.startswith("<") and not file.startswith("<frozen "):
        return False
    if file.startswith(internals.torch_directory()):
        return True
    return distribution_of(file) in _BUILT_ON or origin_of_file(file).is_versioned


def _is_of_known_module(kind: type) -> bool:
    module: object = kind.__module__
    return isinstance(module, str) and _is_known_module(module)


@functools.cache
def _is_known_module(name: str) -> bool:
    root = name.partition(".")[0]
    if root in _BUILT_ON or root in sys.stdlib_module_names:
        return True
    module = sys.modules.get(name)
    return module is not None and origin_of(module).is_versioned


def parts_of(value: object) -> Iterator[object]:
    """Yield `value` and all functions that it wraps, without duplicates, outermost first."""
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
    """Return the values in a function's closure, or the function of a partial or bound method."""
    inner: tuple[object, ...] = ()
    if isinstance(value, types.FunctionType):
        if value.__closure__ is None:
            return []
        inner = tuple(map(content_of, value.__closure__))
    elif isinstance(value, partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (types.MethodType, *HOLDERS)):
        inner = (value.__func__,)
    elif isinstance(value, property):
        inner = (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools._lru_cache_wrapper):
        inner = (value.__wrapped__,)
    return [each for each in inner if callable(each) and not isinstance(each, type)]


def foreign_parts(value: object) -> list[object]:
    """Return `value` and the functions that it wraps, if they are not torch's."""
    parts = list(parts_of(value))
    if all(map(_is_of_torch, parts)):
        return []
    return [part for part in parts if isinstance(part, partial) or not _is_of_torch(part)]


def own_name(value: object) -> str | None:
    """Return the name of a function of torch if the name is unambiguous; else None."""
    while isinstance(value, (*HOLDERS, functools._lru_cache_wrapper)):
        value = value.__wrapped__
    if type(value) is not types.FunctionType or foreign_parts(value):
        return None
    function: types.FunctionType = value
    return None if "<" in function.__qualname__ else function.__qualname__


def codes_in(*namespaces: Mapping[str, object]) -> Iterator[types.CodeType]:
    """Yield the code of torch's functions in modules and classes, and of wrapped functions."""
    for members in namespaces:
        for value in list(members.values()):
            if isinstance(value, type) and value.__module__ == members.get("__name__"):
                yield from codes_in(vars(value))
            for part in parts_of(value) if is_code(value) else ():
                if type(part) is types.FunctionType and internals.has_code_of_torch(part):
                    yield part.__code__


# -- operators


def is_of_torch(name: str) -> bool:
    """Return True if torch defines the operator: the file decides, not the namespace.

    Decompositions and fallbacks reach operators that no graph names.
    """
    return name.startswith("aten::") or _is_defined_by_torch(name)


@functools.cache
def _is_defined_by_torch(name: str) -> bool:
    defined = internals.DEFINED_AT.search(internals.dispatch_dump.get()(name))
    if defined is None:
        return False
    if defined[1].startswith(files_that_register_for_others()):
        definition = internals.custom_operators.get().get(name)
        # torch.library.triton_op wraps the user's function in its own.
        return definition is not None and not foreign_parts(definition._init_fn)
    built_in = internals.built_in()
    home = internals.torch_directory()
    return defined[1].startswith((home, built_in) if built_in else home)


@functools.cache
def files_that_register_for_others() -> tuple[str, ...]:
    home = internals.torch_directory()
    return os.path.join(home, "library.py"), os.path.join(home, "_library") + os.sep


def is_operator_of_torch(value: object) -> bool:
    """Return True for an operator of torch, or for a namespace or name with one."""
    if internals.is_higher_order(value):
        return origin_of(type(value)).kind == "torch"
    if internals.kind_of_operator(value) == "namespace":
        found = vars(value).values()
        packets = (each for each in found if internals.kind_of_operator(each) == "packet")
        return any(map(is_operator_of_torch, packets))
    name = value if isinstance(value, str) else internals.full_name(value)
    return "::" not in name or is_of_torch(name)


def is_of_others(value: object) -> bool:
    """Return True for an operator that a program or a library defines.

    Its rules affect only graphs that call it.
    """
    return isinstance(value, internals.operator.get()) and not is_of_torch(value.name())


def is_named_as(operator: Operator, value: object) -> bool:
    """Return True if a function has the name of an operator, as torch's own rules have."""
    if not isinstance(operator, internals.operator.get()):
        return True
    name: str = operator.name().rpartition("::")[2].partition(".")[0]
    return getattr(value, "__name__", "") == name


# -- values in torch's modules that are not code

SCALARS: tuple[type, ...] = (str, bytes, int, bool, float, complex, type(None))


@functools.cache  # called for each of fifty thousand values
def kinds_of_tables() -> tuple[type, ...]:
    """Return the types of containers that may hold constants and can be changed."""
    return dict, list, set, internals.ordered_set.get()


@functools.cache
def kinds_of_values() -> tuple[type, ...]:
    """Return the types of constants, and of containers of them."""
    return (*SCALARS, tuple, frozenset, *kinds_of_tables())


def is_plain(value: object) -> bool:
    """Return True if the text of `value` describes it completely."""
    is_scalar = type(value) in SCALARS
    return is_scalar or internals.is_dtype(value) or internals.is_operator(value)


def is_constant(value: object) -> bool:
    """Return True for values of tables that torch does not write to after its import."""
    return (
        type(value) in kinds_of_values()
        or internals.is_dtype(value)
        or internals.is_operator(value)
        or isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
    )


def is_same_value(old: object, new: object, depth: int = 0) -> bool:
    """Return True if two constants are the same, without their own `==`; 1 is not True."""
    if old is new:
        return True
    kind = type(old)
    if kind is not type(new) or kind not in kinds_of_values() or depth > _s3cache_process.MAX_DEPTH:
        return False
    if isinstance(old, SCALARS):
        return old == new
    ours, theirs = (
        [*each, *each.values()] if isinstance(each, dict) else list(cast("Iterable[object]", each))
        for each in (old, new)
    )
    return len(ours) == len(theirs) and all(
        is_same_value(one, other, depth + 1) for one, other in zip(ours, theirs, strict=True)
    )
