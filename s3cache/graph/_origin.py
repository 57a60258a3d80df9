"""Decide whether an object that stands where torch looks is torch's own.

The file that its code lies in decides, and nothing that it says of itself.
"""

from __future__ import annotations

import dis
import functools
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial

from s3cache.graph._identity import (
    NATIVE,
    UnidentifiedError,
    distribution_of,
    identity,
    origin_of,
    origin_of_file,
)
from s3cache.torch_api import internals
from s3cache.util.snapshot import ABSENT, content_of

# Libraries that torch is built on, as its modules import their functions and classes.
_BUILT_ON = frozenset(
    """
    cuda expecttest filelock fsspec functorch jinja2 markupsafe mpmath networkx numpy optree
    packaging psutil pybind11 setuptools sympy torchgen tqdm triton typing_extensions
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
_HOLDERS = (staticmethod, classmethod)
_MAX_DEPTH = 8
_BY_OTHER_NAMES = {
    "itruediv": "idiv",
    "logsigmoid": "log_sigmoid",
    "pos": "positive",
    "torch_dispatch": "disabled_torch_dispatch_impl",
    "torch_function": "disabled_torch_function_impl",
}


def is_code(value: object) -> bool:
    """Return True if it is called, or runs something where it is read from an object."""
    return callable(value) or isinstance(value, (*_HOLDERS, property, *NATIVE))


def is_foreign(value: object, name: object = "", *, surveyed: bool = False) -> bool:
    """Return True if code other than torch's is in `value`, as far as can be seen.

    Args:
        value: anything; what is no code is not foreign.
        name: where it is found, if a native function there must bear that name.
        surveyed: it may have been there since `import torch`: code that was compiled from a text
            under no name, as torch compiles some, counts as torch's then.
    """
    if isinstance(value, NATIVE):
        return isinstance(name, str) and bool(name) and not _bears(value.__name__, name)
    if isinstance(value, type):
        return not _is_of_known_module(value)
    if isinstance(value, types.ModuleType) or not is_code(value):
        return False
    return any(not _is_of_torch(part, surveyed) for part in parts_of(value))


def _bears(own: str, name: str) -> bool:
    """Return True if a native function is at home: `linalg_inv` is `torch.linalg.inv`."""
    own, name = own.strip("_"), name.strip("_")
    return own in (name, _BY_OTHER_NAMES.get(name)) or own.endswith(f"_{name}")


def _is_of_torch(value: object, surveyed: bool = False) -> bool:
    """Return True if torch made it, or has it from Python or from what it is built on."""
    if isinstance(value, (*_HOLDERS, property, functools._lru_cache_wrapper)):
        return True  # it depends on what it holds
    if type(value).__module__ == "unittest.mock":
        return False  # what such an object does is in no code
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
        # Not all that is imported was installed with a record; and torch compiles code from texts.
        root = module.__name__.partition(".")[0]
        return root in _BUILT_ON or (file.startswith("<") and origin_of(module).is_versioned)
    return value in _generated() or (surveyed and file.startswith("<") and _has_no_module(value))


def _has_no_module(function: types.FunctionType) -> bool:
    name = function.__globals__.get("__name__")
    return name is None or str(name).startswith("namedtuple_")


@functools.cache
def _generated() -> frozenset[object]:
    return frozenset(internals.generated_operations())


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


def is_misplaced(value: object, place: str, name: object) -> bool:
    """Return True if the file of a namespace defines a function `name`, and `value` is another.

    For where torch was first seen late: `F.relu = F.silu` looks like torch's own.

    Args:
        place: a module, or a class as `module:name`.
    """
    if not isinstance(value, types.FunctionType):
        return False
    code = value.__code__
    is_wrapper = bool(code.co_freevars)
    wraps = is_wrapper and code.co_name != value.__name__  # so it bears the name of what it wraps
    if (value.__name__ if wraps else code.co_name) == name or (is_wrapper and not wraps):
        return False
    module, _, kind = place.partition(":")
    # Classes of torch's say that they are from elsewhere.
    file = code.co_filename if kind else getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and name in _defined_in(file)


_DEFINED = re.compile(r"^[ \t]*(?:async )?def (\w+)", re.MULTILINE)


@functools.cache
def _defined_in(file: str) -> frozenset[str]:
    """Return the names of all functions and methods that a source file defines."""
    try:
        with open(file, encoding="utf-8") as source:
            return frozenset(_DEFINED.findall(source.read()))
    except (OSError, ValueError):
        return frozenset()


def is_same_code(old: object, new: object) -> bool:
    """Return True if torch has made the same again, or only keeps Dynamo out of it."""
    if internals.is_kept_from_dynamo(new, old):
        return True
    name = _own_name(old)
    if name is not None and name == _own_name(new):
        return True
    if type(old) is not type(new) or isinstance(new, type):
        return False
    try:
        return text_of(old) == text_of(new)
    except UnidentifiedError:
        return False


def _own_name(value: object) -> str | None:
    """Return the name of a function of torch's that is the only one of that name."""
    while isinstance(value, (*_HOLDERS, functools._lru_cache_wrapper)):
        value = value.__wrapped__
    if type(value) is not types.FunctionType or foreign_parts(value):
        return None
    function: types.FunctionType = value
    return None if "<" in function.__qualname__ else function.__qualname__


def parts_of(value: object) -> Iterator[object]:
    """Yield `value` and all functions that it wraps, each once, the outermost first."""
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
    """Return what a function has in its closure, or what a partial or a bound method calls."""
    inner: tuple[object, ...] = ()
    if isinstance(value, types.FunctionType):
        if value.__closure__ is None:
            return []
        inner = tuple(map(content_of, value.__closure__))
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
    """Return what of `value`, and of all that it wraps, is not torch's."""
    parts = list(parts_of(value))
    if all(map(_is_of_torch, parts)):
        return []
    return [part for part in parts if isinstance(part, partial) or not _is_of_torch(part)]


def text_of(value: object, registered: Callable[[object], str | None] = lambda _: None) -> str:
    """Return the identity of `value`, which another process has for the same code only.

    Raises:
        UnidentifiedError: some of its code has none.
    """
    return "nothing" if value is ABSENT else identity(value, registered)


def assigns(code: types.CodeType, name: str) -> bool:
    """Return True if code binds a global, an attribute or a variable of a closure of that name."""
    if name in (*code.co_names, *code.co_freevars, *code.co_cellvars) and any(
        each.argval == name and each.opname in _BINDING for each in dis.get_instructions(code)
    ):
        return True
    if name in code.co_consts and not {"setattr", "globals"}.isdisjoint(code.co_names):
        return True
    return any(assigns(each, name) for each in code.co_consts if type(each) is types.CodeType)


_BINDING = frozenset(
    f"{verb}_{kind}" for verb in ("STORE", "DELETE") for kind in ("GLOBAL", "ATTR", "DEREF")
)


# -- operators


def is_of_torch(name: str) -> bool:
    """Return True if torch defines the operator: the file decides, and not the namespace.

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
        return definition is not None and origin_of(definition._init_fn).kind == "torch"
    built_in = internals.built_in()
    home = internals.torch_directory()
    return defined[1].startswith((home, built_in) if built_in else home)


@functools.cache
def files_that_register_for_others() -> tuple[str, ...]:
    home = internals.torch_directory()
    return os.path.join(home, "library.py"), os.path.join(home, "_library") + os.sep
