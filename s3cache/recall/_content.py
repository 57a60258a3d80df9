"""What stands for an object that Dynamo read, in place of its identity.

Dynamo guards functions, classes and modules by identity, which says nothing in another process.
Here each object becomes a text that is equal in another process only if Dynamo would read the same
from it: of a function its code, defaults and closure; of a class all its members and those of its
bases; of a module of a network or any other object its class and the names of its attributes; of a
tensor its metadata. What is behind an attribute, an item or a variable that Dynamo went on to read
has a text of its own, as Dynamo asks for each of them by a source.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import os
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, cast

from s3cache.graph import code_digest, is_torch_file
from s3cache.torch_api import dynamo
from s3cache.util.snapshot import content_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_TABLE_KINDS: Final = (dict, OrderedDict)
_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_SHORT = 200
_MAX_DEPTH = 24
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what a class statement makes
# Of each class, and no code.
_NO_MEMBERS = frozenset(
    """
    __abstractmethods__ __annotations__ __annotate__ __annotate_func__
    __annotations_cache__ __dict__ __doc__ __firstlineno__ __module__ __parameters__
    __static_attributes__ __weakref__ _abc_impl
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
_NATIVE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
#: Attributes of a function that change what Dynamo makes of a call, and run code as it traces.
_MARKS = re.compile(r"_dynamo_marked_constant|_torchdynamo_\w+|_dynamo_\w+")
_HARMLESS_MARKS = frozenset({"_torchdynamo_inline", "_torchdynamo_orig_callable"})
#: Classes of objects that Dynamo asks nothing of.
_OPAQUE = frozenset({"torch._C._distributed_c10d.Logger", "torch._C._distributed_c10d.Reducer"})
_TABLES = ("_parameters", "_buffers", "_modules")


class UnknownContentError(Exception):
    """Nothing says what an object is, so a frame that reads it is not recalled."""


class Contents:
    """Texts of objects; what it has read once it remembers, so it is for one moment.

    Attributes:
        codes: all compiled code that is in those texts, with the globals it runs under.
    """

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, dict[str, object]] = {}
        self._texts: dict[int, tuple[object, str]] = {}

    def of(self, value: object, *, is_state: bool = False) -> str:
        """Return the text of an object; ``is_state`` is a parameter or a buffer of a module.

        Raises:
            UnknownContentError: it has none.
        """
        kind = type(value)
        if kind in _PLAIN:
            return _plain(value)
        known = self._texts.get(id(value))
        if known is None:
            known = self._texts[id(value)] = value, self._of(value, 0, is_state=is_state)
        return known[1]

    def knows(self, value: object) -> bool:
        """Return whether the text of an object is in one of those that were asked for."""
        return id(value) in self._texts

    def _of(self, value: object, depth: int, *, is_state: bool) -> str:
        import torch

        kind = type(value)
        if kind in _TABLE_KINDS:
            return f"{kind.__name__} {self._keys(value)}"
        if isinstance(value, torch.Tensor):
            return f"{self._class(kind, depth)} {_tensor_text(value, is_state=is_state)}"
        if isinstance(value, torch.nn.Module):
            return f"{self._class(kind, depth)} {_module_text(value)}"
        if isinstance(value, torch.optim.Optimizer):
            raise UnknownContentError("an optimizer, which Dynamo reads as a whole")
        text = self._code(value, depth)
        if text is not None:
            return text
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return f"{kind.__name__} {value}"
        if isinstance(value, enum.Enum):
            return f"{self._class(kind, depth)}.{value.name}={_shallow(value.value)}"
        if value is os.environ._data:  # type: ignore[attr-defined]
            return "the environment"  # of which guards say what was asked for
        if isinstance(value, (dict, types.MappingProxyType)):
            return f"{self._class(kind, depth)} {self._keys(dict(value))} {_attributes(value)}"
        if isinstance(value, (set, frozenset)):
            return f"{self._class(kind, depth)} {[self._key(each, depth) for each in value]}"
        if isinstance(value, (list, tuple, deque)):
            return f"{self._class(kind, depth)} {len(value)} {_attributes(value)}"
        if isinstance(value, (range, slice)):
            return repr(value)
        if isinstance(value, _VIEWS):
            return f"{kind.__name__} {len(cast('list[object]', value))}"
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            is_array = kind.__name__ == "ndarray"  # it is an input of the graph
            about = getattr(value, "shape", None) if is_array else repr(value)
            return f"numpy {kind.__name__} {value.dtype} {about}"
        if isinstance(value, re.Pattern):
            return repr(value)
        if isinstance(value, _PLAIN):  # of a subclass
            base = next(each for each in _PLAIN if isinstance(value, each))
            plain = cast("Callable[[object], object]", base)(value)
            return f"{self._class(kind, depth)} {_plain(plain)} {_attributes(value)}"
        if kind.__flags__ & _HEAP_TYPE and type(kind).__name__ != "pybind11_type":
            return f"{self._class(kind, depth)} {_attributes(value)}"
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _OPAQUE:
            return name
        raise UnknownContentError(f"a {name}")

    def _keys(self, table: object) -> list[str]:
        return [
            each if type(each) is str else self._key(each, 0)
            for each in cast("dict[object, object]", table)
        ]

    def _key(self, key: object, depth: int) -> str:
        if isinstance(key, tuple):
            return f"({', '.join(self._key(each, depth) for each in key)})"
        if type(key) in _PLAIN:
            return _plain(key)
        import torch

        if isinstance(key, (torch.Tensor, torch.nn.Module)):
            raise UnknownContentError(f"a table by {type(key).__qualname__}")
        return self._inside(key, depth + 1)

    # -- code

    def _code(self, value: object, depth: int) -> str | None:
        """Return the text of what is called, or is a class or a module; None for anything else."""
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            inner = self._inside(value.__func__, depth + 1)
            return f"method {inner} of {self._class(type(value.__self__), depth + 1)}"
        if isinstance(value, type):
            return self._class(value, depth)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, functools.partial):
            parts = (
                value.func,
                *value.args,
                *(each for pair in value.keywords.items() for each in pair),
            )
            return f"partial {[self._inside(each, depth + 1) for each in parts]}"
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__} {self._inside(value.__func__, depth + 1)}"
        if isinstance(value, property):
            parts = value.fget, value.fset, value.fdel
            return f"property {[self._inside(each, depth + 1) for each in parts]}"
        if isinstance(value, functools.cached_property):
            return f"cached {self._inside(value.func, depth + 1)}"
        if isinstance(value, functools._lru_cache_wrapper):
            return f"lru_cache {self._inside(value.__wrapped__, depth + 1)}"
        if isinstance(value, _NATIVE):
            owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, (type, types.ModuleType)):
                owner = type(owner)
            return f"native {getattr(owner, '__name__', '')} {getattr(value, '__module__', '')}.{value.__name__}"  # noqa: E501
        if type(value).__module__ == "torch._ops":
            return f"operator {value}"
        if isinstance(value, types.CodeType):
            self._note(value, {})
            return f"code {_digest_of_code(value)}"
        return None

    def _function(self, function: types.FunctionType, depth: int) -> str:
        code, marks = function.__code__, vars(function)
        for mark in marks:
            if _MARKS.fullmatch(mark) and mark not in _HARMLESS_MARKS:
                if is_torch_file(code.co_filename):
                    continue
                raise UnknownContentError(f"{function.__qualname__}, which bears {mark}")
        self._note(code, function.__globals__)
        held = [self._cell(each, depth + 1) for each in function.__closure__ or ()]
        given = [self._inside(each, depth + 1) for each in function.__defaults__ or ()]
        named = [
            f"{name}={self._inside(each, depth + 1)}"
            for name, each in sorted((function.__kwdefaults__ or {}).items())
        ]
        name = f"{function.__module__}.{function.__qualname__}"
        return f"function {name} {_digest_of_code(code)} {held} {given} {named} {sorted(marks)}"

    def _cell(self, cell: types.CellType, depth: int) -> str:
        return self._inside(content_of(cell), depth)

    def _inside(self, value: object, depth: int) -> str:
        """Return the text of something that an object holds, and that Dynamo reads if it needs it.

        Of what is neither code nor a constant this is its class alone.
        """
        kind = type(value)
        if kind in _PLAIN:
            return _plain(value)
        if id(value) in self._texts:
            return self._texts[id(value)][1]
        if depth > _MAX_DEPTH:
            raise UnknownContentError("code that refers to too much")
        self._texts[id(value)] = value, f"itself {getattr(value, '__qualname__', '')}"  # a cycle
        if kind is tuple or kind is list:
            text = f"{kind.__name__} {[self._inside(each, depth + 1) for each in cast('list[object]', value)]}"  # noqa: E501
        else:
            found = self._code(value, depth)
            if found is None and isinstance(value, enum.Enum):
                found = f"{kind.__qualname__}.{value.name}"
            text = f"a {kind.__module__}.{kind.__qualname__}" if found is None else found
            if found is None:
                del self._texts[id(value)]  # its content was not read
                return text
        self._texts[id(value)] = value, text
        return text

    def _note(self, code: types.CodeType, names: dict[str, object]) -> None:
        if code not in self.codes:
            self.codes[code] = names
            for constant in code.co_consts:
                if isinstance(constant, types.CodeType):
                    self._note(constant, names)

    # -- classes

    def _class(self, kind: type, depth: int) -> str:
        known = self._texts.get(id(kind))
        if known is not None:
            return known[1]
        name = f"{kind.__module__}.{kind.__qualname__}"
        self._texts[id(kind)] = kind, f"class {name}"  # while its members are read
        parts: list[str] = []
        if type(kind) is not type:
            parts.append(self._class(type(kind), depth + 1))
        for base in kind.__mro__:
            if base is not kind and base is not object:
                parts.append(self._class(base, depth + 1))
        if kind.__flags__ & _HEAP_TYPE:
            parts += self._members(kind, depth)
        text = f"class {name} {_digest(parts)}"
        self._texts[id(kind)] = kind, text
        return text

    def _members(self, kind: type, depth: int) -> Iterable[str]:
        for name, member in [*vars(kind).items()]:
            if name in _NO_MEMBERS or name.startswith(("_abc_", "__orig_")):
                continue
            function = (
                member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            )
            if isinstance(function, types.FunctionType) and is_torch_file(
                function.__code__.co_filename
            ):
                self._note(function.__code__, function.__globals__)
                yield f"{name} {function.__qualname__} {function.__code__.co_firstlineno}"
            else:
                yield f"{name} {self._inside(member, depth + 1)}"
        registered = getattr(kind, "_abc_impl", None)
        if registered is not None:
            yield f"registered {_registered(kind)}"


def _registered(kind: type) -> list[str]:
    """Return the names of the classes that were registered as subclasses."""
    dump = importlib.import_module("_abc")._get_dump
    found = (reference() for reference in dump(kind)[0])
    return sorted(f"{each.__module__}.{each.__qualname__}" for each in found if each is not None)


def _plain(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= _SHORT else f"{text[:40]} {_digest([text])}"


def _shallow(value: object) -> str:
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(map(_shallow, value))}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {[*map(_shallow, value)]}"
    if isinstance(value, dict):
        return f"dict {sorted((_shallow(k), _shallow(each)) for k, each in value.items())}"
    return _plain(value) if type(value) in _PLAIN else type(value).__qualname__


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode(errors="surrogatepass")).hexdigest()[:32]


@functools.lru_cache(maxsize=4096)
def _digest_of_code(code: types.CodeType) -> str:
    names = (code.co_name, code.co_varnames, code.co_freevars, code.co_cellvars)
    return _digest([repr(names), code_digest(code)])


def _attributes(value: object) -> list[str]:
    """Return the names of attributes that an object has by itself.

    Some of torch's have a random part.
    """
    found = getattr(value, "__dict__", None)
    return sorted(_UUID.sub("", str(name)) for name in found) if isinstance(found, dict) else []


_UUID = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")


def _module_text(module: Module) -> str:
    """Return what a module of a network has, by name: what is behind each is read by itself."""
    state = vars(module)
    tables = [
        [f"{name}-" if each is None else name for name, each in state.get(table, {}).items()]
        for table in _TABLES
    ]
    hooks = [
        f"{name} {len(value)}"
        for name, value in state.items()
        if "hooks" in name and isinstance(value, (dict, OrderedDict, defaultdict)) and value
    ]
    return f"{_attributes(module)} {tables} {hooks} {state.get('training')}"


def tensor_guarded(tensor: Tensor) -> str:
    """Return what torch's own guard looks at of a tensor, but for its class and sizes."""
    keys = dynamo.dispatch_keys(tensor)
    return f"{tensor.dtype} {tensor.device} {tensor.requires_grad} {tensor.dim()} {keys}"


def _tensor_text(tensor: Tensor, *, is_state: bool) -> str:
    """Return what Dynamo, and what is compiled, may depend on of a tensor, but for its sizes."""
    state = dict(getattr(tensor, "__dict__", None) or {})
    if is_state:  # Dynamo marks them as it traces
        state.pop("_dynamo_static_input_type", None)
    marks = sorted(f"{name}={_shallow(value)}" for name, value in state.items())
    parts: list[object] = [
        str(tensor.dtype),
        str(tensor.device),
        str(tensor.layout),
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.dim(),
        tensor._base is not None,
        tensor.is_inference(),
        dynamo.dispatch_keys(tensor),
        marks,
    ]
    return str(parts)
