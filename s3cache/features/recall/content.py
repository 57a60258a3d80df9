"""Describe an object that Dynamo read by its content instead of its identity.

Dynamo guards functions, classes and modules by identity, which is meaningless in another process.
Here each object becomes a text that is equal in another process only if Dynamo would read the same
from it. The text of a function has its code, defaults and closure; that of a class all its members
and those of its bases; that of an ``nn.Module`` or another object its class and the names of its
attributes; that of a tensor its metadata. If Dynamo goes on to read an attribute, an item or a
variable, the value has its own source and its own text.
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import dis
import enum
import functools
import hashlib
import importlib
import os
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, KeysView, Mapping
from typing import TYPE_CHECKING, Any, Final, cast, get_args, get_origin
from weakref import WeakKeyDictionary

from s3cache.features.recall import names
from s3cache.features.recall.sets import is_ordered
from s3cache.graph import (
    NATIVE,
    PLAIN,
    PLAIN_KINDS,
    Describer,
    UnidentifiedError,
    code_digest,
    origin_of,
    origin_of_file,
    unwrap_patch,
    wrapped_parts,
)
from s3cache.torch_api import internals
from s3cache.util.snapshot import content_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

#: Roles of tensors that Dynamo marks while it traces: in a module, in an optimizer.
OF_MODULE: Final = 1
OF_OPTIMIZER: Final = 2
#: A set of which the order is not in Dynamo's result.
WITHOUT_ORDER: Final = 3
_TABLE_KINDS: Final = (dict, OrderedDict)
_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_SHORT = 200
OWN_KINDS: Final = ("torch", "python")
_MAX_PARTS = 20_000
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by a module in C
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: most classes of such a module
# Members that every class has and that are not code.
_NO_MEMBERS = frozenset(
    """
    __abstractmethods__ __annotations__ __annotate__ __annotate_func__
    __annotations_cache__ __dict__ __doc__ __firstlineno__ __module__ __parameters__ __slotnames__
    __static_attributes__ __weakref__ _abc_impl
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
_ALIASES: Final = (types.UnionType, types.GenericAlias)
#: Types of objects that are described as code.
_CODE = (types.FunctionType, types.ModuleType, types.CodeType, type, *NATIVE, *_ALIASES)
#: Attributes of a function that change how Dynamo treats a call, and run code during the trace.
_MARKS = re.compile(r"_dynamo_marked_constant|_torchdynamo_\w+|_dynamo_\w+")
_OF_REGION = "marked_compile_region"  # in the names of options of a nested region
_HARMLESS_MARKS = frozenset({"_torchdynamo_inline", "_torchdynamo_orig_callable"})
#: Attributes of a function in which torch remembers something, and an address.
_MEMOS = frozenset({"__dynamo_disable", "_torchdynamo_wrapper_id"})
#: Methods that Dynamo runs while it traces; they may read anything.
_RUN_BY_DYNAMO = frozenset(
    {"__class_getitem__", "__instancecheck__", "__subclasscheck__", "__subclasshook__"}
)
#: C modules with functions that depend only on their arguments, and the exceptions.
_PURE = frozenset(
    """
    _abc _bisect _collections _collections_abc _functools _heapq _operator _sre _string _struct
    array bisect builtins cmath functools heapq itertools math numpy operator torch unicodedata zlib
    """.split()  # noqa: SIM905 - one word a line is harder to read
)
_NOT_PURE = frozenset({"builtins.id", "builtins.hash", "builtins.input", "builtins.open"})
#: Classes of objects that Dynamo does not look into.
_OPAQUE = frozenset({"torch._C._distributed_c10d.Logger", "torch._C._distributed_c10d.Reducer"})
_TYPING: Final = "typing_extensions"
_TABLES = ("_parameters", "_buffers", "_modules")
#: Environment variables that torch sets while it compiles, and settings of s3cache.
NOT_COMPARED: Final = re.compile(
    "_?TORCHINDUCTOR_|TRITON_|KMP_|TORCH_WARM_POOL|CUBLAS_WORKSPACE|S3CACHE_"
)


class ContentDescriber:
    """Makes texts of objects. It remembers them, so objects must not change during its life.

    Attributes:
        codes: all code objects in the texts, with their globals.
        modules: all modules in the texts.
    """

    def __init__(self) -> None:
        self.codes: dict[types.CodeType, dict[str, object]] = {}
        self.modules: list[types.ModuleType] = []
        self._texts: dict[int, tuple[object, str]] = {}
        self._parts: dict[int, tuple[object, str, list[object]]] = {}

    def of(self, value: object, role: int = 0) -> str:
        """Return the text of an object in one of the roles, or in none.

        Raises:
            UnidentifiedError: it has none.
        """
        value = unwrap_patch(value)
        kind = type(value)
        if kind in PLAIN_KINDS:
            return _plain(value)
        memo = self._texts.get(id(value))
        if memo is None:
            memo = self._texts[id(value)] = value, self._of(value, role)
        return memo[1]

    def by_single_keys(self, table: object) -> str | None:
        """Return the text of a table of the process, of which only single keys are read.

        It is None for any other object. Each trace imports modules, so their names are not in the
        text; there is a question for each that Dynamo missed.
        """
        if is_environment(table):
            names = cast("dict[bytes, bytes]", table)
            return str(sorted(name for name in names if not NOT_COMPARED.match(os.fsdecode(name))))
        return "imported modules" if table is sys.modules else None

    def whole(self, value: object) -> str:
        """Return the text of an object including its elements, if it has any."""
        is_whole = isinstance(value, (list, tuple))
        return _PartDescriber().of(value) if is_whole else self.of(value)

    def knows(self, value: object) -> bool:
        """Return whether an object is described in one of the texts so far."""
        return id(value) in self._texts or id(value) in self._parts

    def _of(self, value: object, role: int) -> str:
        import torch

        kind = type(value)
        if kind in _TABLE_KINDS:
            return f"{kind.__name__} {_keys(cast('dict[object, object]', value))}"
        if isinstance(value, torch.Tensor):
            return f"{self.of(kind)} {_tensor_text(value, role)}"
        if isinstance(value, torch.nn.Module):
            return f"{self.of(kind)} {_module_text(value)}"
        if self._part(value) is not None:
            return self._code(value)
        if kind.__module__ == names.DECORATORS:
            raise UnidentifiedError(f"a {kind.__qualname__}, which changes options of Dynamo")
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return f"{kind.__name__} {value}"
        if isinstance(value, enum.Enum):
            _check_methods(kind)
            return f"{self.of(kind)}.{value.name}={_Shallow().of(value.value)}"
        if isinstance(value, (dict, types.MappingProxyType)):
            return f"{self.of(kind)} {_keys(dict(value))} {_attributes(value)}"
        if isinstance(value, (set, frozenset)):
            keys = _keys(value)
            if role == WITHOUT_ORDER:
                keys.sort()
            elif not is_ordered(value):
                raise UnidentifiedError("a set, in an order of this process; see PYTHONHASHSEED")
            return f"{self.of(kind)} {keys}"
        if isinstance(value, (list, tuple, deque)):
            return f"{self.of(kind)} {len(value)} {_attributes(value)}"
        if isinstance(value, (range, slice)):
            return repr(value)
        if isinstance(value, KeysView):  # a guard on it compares its length only
            return f"{kind.__name__} {_keys(value)}"
        if isinstance(value, _VIEWS):
            return f"{kind.__name__} {len(cast('list[object]', value))}"
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            is_array = kind.__name__ == "ndarray"  # it is an input of the graph
            about = getattr(value, "shape", None) if is_array else repr(value)
            return f"numpy {kind.__name__} {value.dtype} {about}"
        if isinstance(value, PLAIN):  # of a subclass
            _check_methods(kind)
            base = next(each for each in PLAIN if isinstance(value, each))
            return f"{self.of(kind)} {_plain(cast('type', base)(value))} {_attributes(value)}"
        if is_layout(value):
            return _Layout().of(value)
        if internals.is_opaque_type.get()(kind):
            raise UnidentifiedError(f"a {kind.__qualname__}, with methods that torch runs")
        if names.is_constant_class.get()(kind):
            _check_methods(kind)
        # The methods of a class in C read what no text has.
        if not is_whole(value) and (of := _base_in_c(kind)) is not None:
            raise UnidentifiedError(f"a {kind.__qualname__}, which is a {of.__qualname__}")
        if isinstance(value, torch.amp.autocast):
            state = [f"{getattr(value, name)!r}" for name in names.AUTOCAST]
            return f"{self.of(kind)} {_attributes(value)} {state}"
        is_of_python = kind.__flags__ & _HEAP_TYPE and type(kind).__name__ != "pybind11_type"
        if is_of_python or kind is types.SimpleNamespace or is_whole(value):
            return f"{self.of(kind)} {_attributes(value)}"
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _OPAQUE:
            return name
        raise UnidentifiedError(f"a {name}")

    # -- code: callables, classes and modules
    #
    # Each object has its own text, with numbers in place of the objects that it refers to. The full
    # text joins the texts of all objects that are reachable, in the order of the walk. So it does
    # not depend on earlier calls, and cycles are no problem.

    def _code(self, root: object) -> str:
        """Return the text of a callable or a class with all objects reachable from it."""
        numbers: dict[int, int] = {id(root): 0}
        met: list[object] = [root]
        lines: list[str] = []
        for value in met:  # grows during the loop
            part = self._part(value)
            assert part is not None
            text, refs = part
            for each in refs:
                if numbers.setdefault(id(each), len(met)) == len(met):
                    met.append(each)
            lines.append(f"{text} {[numbers[id(each)] for each in refs]}")
            if len(met) > _MAX_PARTS:
                raise UnidentifiedError("code that refers to too much")
        return lines[0] if len(lines) == 1 else f"{lines[0][:_SHORT]} {_digest(lines)}"

    def _part(self, value: object) -> tuple[str, list[object]] | None:
        """Return the text of one object and the objects it refers to; None if it is not code."""
        memo = self._parts.get(id(value))
        if memo is None:
            part = _PartDescriber()
            text = self._described(value, part)
            if text is None:
                return None
            memo = self._parts[id(value)] = value, text, part.references
        return memo[1], memo[2]

    def _described(self, value: object, part: _PartDescriber) -> str | None:
        if isinstance(value, types.FunctionType):
            return self._function(value, part)
        if isinstance(value, type):
            return self._class(value, part)
        if isinstance(value, types.ModuleType):
            self.modules.append(value)
            return f"module {value.__name__}"
        if isinstance(value, types.MethodType):
            owner = type(value.__self__)
            text = part.all("method", [value.__func__, owner])
            # Dynamo reads the mode of a decorator, such as torch.inference_mode, without a source.
            is_torchs = origin_of(owner).kind == "torch" and callable(getattr(owner, "clone", None))
            return f"{text} {plain_content(value.__self__)}" if is_torchs else text
        if (wrapped := wrapped_parts(value)) is not None:
            return part.all(type(value).__name__, wrapped)
        if isinstance(value, NATIVE):
            return _native(value)
        if type(value).__module__ == "torch._ops":  # with many classes, and no state
            return f"operator {value}"
        if isinstance(value, _ALIASES):
            return part.all(type(value).__name__, [get_origin(value), *get_args(value)])
        if isinstance(value, types.CodeType):
            self.note(value, {})
            return f"code {_digest_of_code(value)}"
        return None

    def _function(self, function: types.FunctionType, part: _PartDescriber) -> str:
        code, marks = function.__code__, vars(function)
        is_torchs = origin_of_file(code.co_filename).kind == "torch"
        for mark in () if is_torchs else marks:
            if _MARKS.fullmatch(mark) and mark not in _HARMLESS_MARKS:
                raise UnidentifiedError(f"{function.__qualname__}, which has {mark}")
        self.note(code, function.__globals__)
        held = [*map(content_of, function.__closure__ or ())]
        named = sorted((function.__kwdefaults__ or {}).items())
        arguments = part.all("", [held, function.__defaults__ or (), named])
        name = f"{function.__module__}.{function.__qualname__}"
        own = [
            # The attributes of a function of torch have no sources.
            f"{mark}={_Shallow().of(marks[mark])}" if is_torchs or _OF_REGION in mark else mark
            for mark in sorted({*marks} - _MEMOS)
        ]
        return f"function {name} {_digest_of_code(code)} {arguments} {own} {_treatment(function)}"

    def note(self, code: types.CodeType, names: dict[str, object]) -> None:
        """Note code and its nested code with the global names that it runs under."""
        if code not in self.codes:
            self.codes[code] = names
            for constant in code.co_consts:
                if isinstance(constant, types.CodeType):
                    self.note(constant, names)

    def _class(self, kind: type, part: _PartDescriber) -> str:
        texts = [*map(part.of, (type(kind), *kind.__mro__[1:]))]
        if kind.__flags__ & _HEAP_TYPE:
            texts += self._members(kind, part)
        if issubclass(kind, enum.Enum):  # Dynamo reads them without sources
            texts += [f"{each.name}={_Shallow().of(each.value)}" for each in kind]
        return f"class {kind.__module__}.{kind.__qualname__} {_digest(texts)}"

    def _members(self, kind: type, part: _PartDescriber) -> Iterator[str]:
        is_users = origin_of(kind).kind == "user"
        for name, member in [*vars(kind).items()]:
            is_held = isinstance(member, (staticmethod, classmethod))
            function = cast(
                "types.FunctionType", unwrap_patch(member.__func__ if is_held else member)
            )
            file = function.__code__.co_filename if isinstance(function, types.FunctionType) else ""
            # What stands in for Python's ``typing`` reads nothing else either.
            is_own = origin_of_file(file).kind in OWN_KINDS or kind.__module__ == _TYPING
            if name in _RUN_BY_DYNAMO and file and not is_own:
                raise UnidentifiedError(f"{kind.__qualname__}, with a {name} that is run")
            if name in _NO_MEMBERS or name.startswith(("_abc_", "__orig_")):
                continue
            # A compiled method is torch's wrapper around the user's function.
            is_wrapper = is_users and file and function.__closure__
            if file and origin_of_file(file).kind == "torch" and not is_wrapper:
                self.note(function.__code__, function.__globals__)
                yield f"{name} {function.__qualname__} {function.__code__.co_firstlineno}"
            else:
                yield f"{name} {part.of(member)}"
        if isinstance(kind, abc.ABCMeta):
            dump = importlib.import_module("_abc")._get_dump
            registered = [each for of in dump(kind)[0] if (each := of()) is not None]
            if origin_of(kind).kind == "python":  # libraries register classes at any import
                registered = [each for each in registered if origin_of(each).kind == "user"]
            named = sorted(f"{each.__module__}.{each.__qualname__}" for each in registered)
            yield f"registered {named}"


class _PartDescriber(Describer):
    """Describes objects inside code; Dynamo has a source for each if it reads more of it.

    An object that is neither code nor a constant is described by the name of its class.

    Attributes:
        references: the code that the texts refer to, in order.
    """

    max_depth = 100

    def __init__(self) -> None:
        super().__init__()
        self.references: list[object] = []

    def plain(self, value: object) -> str:
        return _plain(value)

    def special(self, value: object) -> str | None:
        kind = type(value)
        if kind is tuple or kind is list:
            return None
        if isinstance(value, enum.Enum):
            return f"{kind.__qualname__}.{value.name}"
        if isinstance(value, (dict, set, frozenset)):  # in a closure or a default, without a source
            return f"{kind.__qualname__} {_Shallow().of(value)}"
        if isinstance(value, NATIVE):
            return _native(value)
        is_code = isinstance(value, _CODE) or wrapped_parts(value) is not None
        if is_code or kind.__module__ == "torch._ops":
            self.references.append(unwrap_patch(value))  # hooks of s3cache behave like originals
            return "#"
        return f"a {kind.__module__}.{kind.__qualname__}"


def is_whole(value: object) -> bool:
    """Return whether the text of an object has all that Dynamo reads of it.

    A guard on its identity then says no more than the text, and which reads have the same object.
    """
    import torch

    if is_layout(value):
        return True
    if isinstance(value, re.Pattern):
        return not value.flags & re.LOCALE  # its methods read the locale
    dtype = getattr(sys.modules.get("numpy"), "dtype", None)
    if dtype is not None and isinstance(value, dtype):
        return bool(value.isbuiltin == 1)  # otherwise it may have fields and metadata
    return type(value) is object or isinstance(value, torch.amp.autocast)


def _base_in_c(kind: type) -> type | None:
    """Return the class in C of which objects of a class have the content, if it is not torch's."""
    in_c = (
        x for x in kind.__mro__ if not x.__flags__ & _HEAP_TYPE or x.__flags__ & _IMMUTABLE_TYPE
    )
    base = next(in_c)
    # A namespace has nothing but attributes.
    is_known = base in (object, types.SimpleNamespace) or issubclass(base, BaseException)
    return None if is_known or base.__module__.startswith("torch") else base


def _check_methods(kind: type) -> None:
    """Refuse a class of constants with methods that Dynamo runs, and that read more than arguments.

    Dynamo calls operators, ``bool``, ``str`` and such of its constants while it traces.
    """
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if not isinstance(member, types.FunctionType) or not re.fullmatch("__.*__", name):
                continue
            code = member.__code__
            is_own = origin_of_file(code.co_filename).kind in OWN_KINDS
            if not is_own and (code.co_freevars or _reads_globals(code, member.__globals__)):
                raise UnidentifiedError(f"{kind.__qualname__}, with a {name} that reads a global")


def _reads_globals(code: types.CodeType, global_names: Mapping[str, object]) -> bool:
    read = {each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL_READS}
    inner = [nested for nested in code.co_consts if isinstance(nested, types.CodeType)]
    is_pure = read <= _OF_BUILTINS and global_names.keys().isdisjoint(read)
    return not is_pure or any(_reads_globals(nested, global_names) for nested in inner)


_GLOBAL_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"})
_OF_BUILTINS = frozenset(vars(builtins)) - {"id", "hash", "input", "open", "globals", "__import__"}


def check_native(value: object) -> None:
    """Refuse a C function that may return something else in another process.

    Dynamo calls some of them during the trace, and their results are in the traced code.

    Raises:
        UnidentifiedError: it is such a function.
    """
    if not isinstance(value, types.BuiltinFunctionType):
        return
    if id(value) in names.polyfilled.get():  # each call is a question
        return
    if isinstance(module := value.__self__, types.ModuleType):
        package = module.__name__.partition(".")[0]
        if package not in _PURE or f"{package}.{value.__name__}" in _NOT_PURE:
            raise UnidentifiedError(f"{package}.{value.__name__}, which depends on the process")


def _native(value: object) -> str:
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, (type, types.ModuleType)):
        owner = type(owner)
    of = getattr(owner, "__name__", ""), getattr(value, "__module__", "")
    return f"native {of} {getattr(value, '__name__', '')} {_treatment(value)}"


def _treatment(function: object) -> str:
    """Return which sets of functions that Dynamo treats differently have a function."""
    marked = (each.get() for each in names.MARKED_FUNCTIONS)
    return "".join(str(number) for number, ids in enumerate(marked) if id(function) in ids)


def _plain(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= _SHORT else f"{text[:40]} {_digest([text])}"


def _keys(values: Iterable[object]) -> list[str]:
    import torch

    for each in values:
        if isinstance(each, torch.nn.Module):
            raise UnidentifiedError(f"a table by {type(each).__qualname__}")
    return [each if type(each) is str else _PartDescriber().of(each) for each in values]


class _Shallow(Describer):
    """Describes constants and containers of constants."""

    def special(self, value: object) -> str | None:
        is_container = isinstance(value, (set, frozenset, list, tuple, dict))
        return None if is_container else type(value).__qualname__


class _Layout(Describer):
    """Describes how tensors are distributed: meshes of devices, specifications, placements."""

    max_depth = 30

    def special(self, value: object) -> str | None:
        import torch

        if isinstance(value, torch.Tensor):
            return self.of(value.tolist())
        return self.all(type(value).__qualname__, value) if isinstance(value, tuple) else None

    def other(self, value: object) -> str:
        text, state = repr(value), dict(getattr(value, "__dict__", ()))
        if origin_of(type(value)).kind != "torch" or " at 0x" in text:
            return super().other(value)
        for name in names.OF_MESH_IN_PROCESS:
            state.pop(name, None)
        return f"{text}{self.of(state)}" if state else text


class _Metadata(Describer):
    """Describes what a tensor subclass keeps besides its tensors."""

    def code(self, value: object) -> str:
        return self.refuse(f"a tensor subclass with {value!r}", value)

    def other(self, value: object) -> str:
        state = getattr(value, "__dict__", None)
        if not isinstance(state, dict):
            return self.refuse(f"a tensor subclass with a {type(value).__qualname__}", value)
        return f"{type(value).__module__}.{type(value).__qualname__} {self.of(state)}"


def metadata_text(value: Any) -> str:
    """Return the text of the metadata of a wrapper subclass, which torch guards by equality."""
    return _Metadata().of(value.__tensor_flatten__()[1])


def is_layout(value: object) -> bool:
    """Return whether a value is torch's mesh of devices, or describes a distributed tensor."""
    if names.DISTRIBUTED not in sys.modules:
        return False
    kinds = (names.device_mesh.get(), names.tensor_spec.get(), names.placement.get())
    return isinstance(value, kinds)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode(errors="surrogatepass")).hexdigest()[:32]


@functools.lru_cache(maxsize=4096)
def _digest_of_code(code: types.CodeType) -> str:
    names = (code.co_name, code.co_varnames, code.co_freevars, code.co_cellvars)
    return _digest([repr(names), code_digest(code)])


def _attributes(value: Any) -> list[str]:
    """Return the names of an object's own attributes, in order, and what C says of it.

    Some names that torch sets have a random part.
    """
    found = getattr(value, "__dict__", None)
    own = [_UUID.sub("", str(name)) for name in found] if isinstance(found, dict) else []
    for name, member in _members_in_c(type(value)):
        with contextlib.suppress(Exception):  # whatever it lacks
            own.append(f"{name}={_Shallow().of(member.__get__(value))}")
    return own


_members: WeakKeyDictionary[type, list[tuple[str, Any]]] = WeakKeyDictionary()


def _members_in_c(kind: type) -> list[tuple[str, Any]]:
    """Return the attributes that classes in C give to their objects, such as ``deque.maxlen``.

    Dynamo has no source for them. It has one for each slot of a class in Python.
    """
    if kind not in _members:
        _members[kind] = [
            (name, member)
            for base in kind.__mro__
            for name, member in vars(base).items()
            if isinstance(member, (types.GetSetDescriptorType, types.MemberDescriptorType))
            and not name.startswith("__")
            and "__slots__" not in vars(base)
        ]
    return _members[kind]


def plain_content(value: object) -> str:
    """Return the text of a constant or a container; of another object, that of its attributes."""
    held = getattr(value, "__dict__", None)
    return _Shallow().of(value) + (f" {_Shallow().of(held)}" if isinstance(held, dict) else "")


_UUID = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")


def _module_text(module: Module) -> str:
    """Return the names in an ``nn.Module``; Dynamo has a source for each value that it reads."""
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


def is_environment(value: object) -> bool:
    """Return whether a value is the dictionary behind ``os.environ``."""
    return value is getattr(os.environ, "_data", None)


def tensor_guarded(tensor: Tensor) -> str:
    """Return the properties of a tensor that torch's own guard checks, except class and sizes."""
    keys = int(names.dispatch_keys.get()(tensor).raw_repr())
    return f"{tensor.dtype} {tensor.device} {tensor.requires_grad} {tensor.dim()} {keys}"


def _tensor_text(tensor: Tensor, role: int) -> str:
    """Return the properties of a tensor that compiled code may depend on, except its sizes."""
    import torch

    state = dict(getattr(tensor, "__dict__", None) or {})
    # Dynamo sets this mark during the trace: for a module, if the program has set none.
    if role or isinstance(tensor, torch.nn.Parameter):
        own = state.pop(names.STATIC_INPUT, None)
        if own == "guarded" and role != OF_OPTIMIZER:
            state[names.STATIC_INPUT] = own
    words = []  # marks such as those for dynamic sizes
    for name, value in state.items():
        if name == "_specialize_on" and any(value.values()):
            raise UnidentifiedError("a size with specializations")
        is_set = name == names.RANGES
        words.append(f"{name}={sorted(map(repr, value)) if is_set else _Shallow().of(value)}")
    is_view, is_leaf = tensor._base is not None, tensor.is_leaf
    guarded = tensor_guarded(tensor)
    return f"{guarded} {tensor.layout} {is_leaf} {is_view} {tensor.is_inference()} {sorted(words)}"
