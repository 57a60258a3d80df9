"""A digest of what a Python function does: of its code, and of all that it comes by.

Two functions with equal digests behave alike. File names, line numbers and names of local variables
do not matter; constants, defaults, closures, and the functions and values that are referred to do:
through modules and packages, attributes and methods, however far away. What is torch's or Python's
is known by name, as versions in the key say what it is.

Whatever cannot be followed is a reason to refuse: what C code keeps to itself, what a function asks
of the process or the machine. Code of an installed library is followed like any other; where it
comes by such a thing, the digest of all files of the library stands for it.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import contextvars
import ctypes
import decimal
import enum
import functools
import hashlib
import importlib.util
import logging
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import _s3cache_autoload
from s3cache.graph._homes import Home, home_of, home_of_file, is_pure
from s3cache.graph._reads import (
    Chain,
    closure_of,
    code_digest,
    content_of,
    names_in,
    reads_of,
)
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor

    from s3cache.torch_api.protocols import Operator, OperatorPacket

__all__ = ["Parts", "UntoldError", "code_fingerprint", "fingerprint", "told"]

#: What an operator is made of: words, and functions that are run or traced while it is compiled.
Parts: TypeAlias = tuple[Sequence[str], Sequence[object]]

_MAX_VALUES = 50_000
_MAX_NESTED_SETS = 20
_MAX_BYTES = 1 << 22  # of one tensor or array: some milliseconds
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_NATIVE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_VALUES = (str, bytes, int, float, complex)
# What differs between processes that are alike, by the names under which it is asked for.
_ASKS_PROCESS = frozenset(
    """
    current_device device_count get_coordinate get_device_capability get_device_name
    get_device_properties get_global_rank get_group_rank get_local_rank get_node_local_rank get_rank
    get_world_size initial_seed max_memory_allocated mem_get_info memory_allocated memory_reserved
    memory_stats
    """.split()  # noqa: SIM905 - nobody reads one word a line
)
# These are part of a graph where they are traced, but not where they are run.
_DRAWS = frozenset(["rand", "rand_like", "randint", "randn", "randn_like", "randperm"])
# What launchers tell a process of its place among the others.
_RANKS = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
_REFLECTS = frozenset(["getattr", "vars", "dir", "attrgetter", "methodcaller"])
# Members of a class that say nothing about what it does.
_ABOUT_CLASSES = frozenset(
    """
    __abstractmethods__ __annotate__ __annotate_func__ __annotations_cache__
    __conditional_annotations__ __dict__ __firstlineno__ __slotnames__ __slots__
    __static_attributes__ __type_params__ __weakref__ _abc_impl _autograd_function_id
    """.split()  # noqa: SIM905 - nobody reads one word a line
)
# What code seldom asks of a function or a class; followed where it names them.
_SELDOM = ("__annotations__", "__doc__", "__module__", "__name__", "__qualname__")


class UntoldError(Exception):
    """It cannot be told what a function does."""


def fingerprint(value: object, parts_of: Callable[[Operator], Parts] | None = None) -> str:
    """32 hexadecimal digits, the same in every process with the same Python and torch.

    It is that of a function, class or operator that is traced: numbers that it draws at random are
    part of the graph.

    Args:
        value: the function.
        parts_of: what custom operators that it calls are made of; without it they are only named.

    Raises:
        UntoldError: it comes by what cannot be followed; says what.
    """
    return _followed(_Walk(_ASKS_PROCESS, parts_of), value)


def _place_of_table(value: dict[object, object]) -> str | None:
    """Which of torch's tables it is: of decompositions, lowerings and the like."""
    for place in (*_s3cache_autoload.PLACES, *internals.LATER_PLACES):
        if internals.is_table(place) and internals.contents(place) is value:
            return place
    return None


def told(value: object, parts_of: Callable[[Operator], Parts] | None = None) -> str:
    """The same of a function that is run while something is compiled; may draw no numbers."""
    return _followed(_Walk(_ASKS_PROCESS | _DRAWS, parts_of), value)


def _followed(walk: _Walk, value: object) -> str:
    walk.follow(value)
    if walk.untold:
        raise UntoldError(walk.untold)
    return walk.digest()


def code_fingerprint(code: types.CodeType) -> str:
    """The same of compiled Python code by itself, its names and those of its variables."""
    walk = _Walk(frozenset(), None)
    walk.say(code.co_name, *code.co_varnames, *code.co_freevars, "code")
    walk.code(code)
    return walk.digest()


class _Walk:
    """One walk through all that a value comes by, nearest first.

    Members of modules and classes are followed once some code that was met names them.

    Attributes:
        untold: the first thing met that cannot be followed; empty if there is none.
    """

    def __init__(
        self, asks: frozenset[str], parts_of: Callable[[Operator], Parts] | None, depth: int = 0
    ) -> None:
        self.untold = ""
        self._asks = asks
        self._parts_of = parts_of
        self._depth = depth
        self._hash = hashlib.sha256()
        self._order: dict[tuple[int, str], int] = {}
        self._kept: list[object] = []  # an id is only good while its object lives
        self._queue: collections.deque[tuple[int, object, str]] = collections.deque()
        self._names: set[str] = set()
        self._waiting: dict[str, list[tuple[int, str, object, str]]] = {}
        self._reflects = False
        self._asks_environment = False

    def follow(self, value: object) -> None:
        """All of ``value``, until there is no more or it cannot be told."""
        self.say(self._of(value, ""))
        while self._queue and not self.untold:
            index, each, through = self._queue.popleft()
            self.say("\n", index)
            if index > _MAX_VALUES:
                self._refuse("refers to too much", "")
                break
            try:
                self._open(each, index, through)
            except Exception as exc:  # noqa: BLE001 - whatever looking at an object meets
                self._refuse(f"refers to a {_name(type(each))}, which raises {exc!r}", through)
        if self._asks_environment:
            self.say(*(f"{n}={os.environ[n]}" for n in sorted(self._names) if n in os.environ))

    def digest(self) -> str:
        """Of all that was met yet."""
        return self._hash.hexdigest()[:32]

    def say(self, *words: object) -> None:
        """Have the digest depend on ``words``."""
        for word in words:
            text = str(word).encode(errors="surrogatepass")
            self._hash.update(b"%d:" % len(text) + text)

    def _refuse(self, what: str, through: str) -> None:
        """It cannot be followed: a reason, unless a library that it is part of answers for it."""
        self.say("untold", through)
        if not through:
            self.untold = self.untold or what

    def _ask(self, what: str, through: str) -> None:
        """It asks which process this is, or on what machine."""
        self._asks_environment = True
        self._names.update(_RANKS)
        self._refuse(what, through)

    def _of(self, value: object, through: str) -> str:
        """A word for ``value``, which is opened later.

        Args:
            value: what is referred to.
            through: the library by whose code it is referred to, ``""`` for the user's.
        """
        kind = type(value)
        if kind in _PLAIN:
            if kind is str:
                self._learn(names_in(str(value)))
            return f"{kind.__name__} {value!r}"
        of_somebody = isinstance(value, (types.FunctionType, types.ModuleType, type))
        if of_somebody and home_of(value).kind in ("library", "user"):
            through = ""  # whoever wrote it answers for it
        key = id(value), through
        index = self._order.get(key)
        if index is None:
            index = self._order[key] = len(self._order)
            self._kept.append(value)
            self._queue.append((index, value, through))
        return f"#{index}"

    def _all(self, kind: str, values: Iterable[object], through: str) -> None:
        self.say(kind, *(self._of(value, through) for value in values), "end")

    def _open(self, value: object, index: int, through: str) -> None:
        kind = type(value)
        if isinstance(value, types.FunctionType):
            self._function(value, index, through)
        elif isinstance(value, type):
            self._class(value, index, through)
        elif isinstance(value, types.ModuleType):
            self._module(value, index, through)
        elif kind in _CONTAINERS:
            self._contents(value, through)
        elif isinstance(value, types.MethodType):
            self._all("method", (value.__func__, value.__self__), through)
        elif kind is partial:
            assert isinstance(value, partial)
            words = (value.func, value.args, value.keywords, vars(value))
            self._all("partial", words, through)
        elif isinstance(value, _NATIVE):
            self._native(value, through)
        elif isinstance(value, (staticmethod, classmethod)):
            self._all(kind.__name__, (value.__func__,), through)
        elif kind is property:
            assert isinstance(value, property)
            self._all("property", (value.fget, value.fset, value.fdel), through)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._all("cache", (value.__wrapped__,), through)
        elif isinstance(value, types.CodeType):
            self.code(value)
            self._refuse("refers to code by itself", through)
        elif not (self._of_python(value, through) or self._of_torch(value, through)):
            self._object(value, through)

    # -- functions

    def _function(self, function: types.FunctionType, index: int, through: str) -> None:
        home = home_of(function)
        name = _name(function)
        closure = closure_of(function)
        if function.__name__ in self._asks and home.kind == "torch":
            self._ask(f"calls {name}", through)
        if internals.ORIGINAL_CALLABLE in vars(function):
            # torch.compile's wrapper, which refers to most of a compiler, and to any backend.
            self._refuse(f"calls {name}, which is compiled by itself", through)
            return
        if home.is_named:
            if home.kind == "python" and not is_pure(home.name, function.__qualname__):
                self._refuse(f"calls {name}", through)
            if "dispatch_cache" in closure and home.name == "functools":  # of singledispatch
                closure = {"registry": closure["registry"]}
            # What its wrappers hold are users' functions.
            self._all(home.kind, closure.values(), "torch" if home.kind == "torch" else through)
            self.say(name, home.name)
            return
        through = home.name
        self.say("function", through)
        self.code(function.__code__)
        self._all("defaults", (function.__defaults__, function.__kwdefaults__), through)
        if vars(function):
            self._all("attributes", (vars(function),), through)
        for seldom in _SELDOM:
            self._wait(index, seldom, getattr(function, seldom, None), through)
        reads = reads_of(function.__code__)
        for asked in sorted(self._asks & reads.names):
            self._ask(f"{name} names {asked}", through)
        self._learn(reads.names)
        for chain in reads.chains:
            self._read(chain, function, closure, through)
        if home.kind == "library":
            self._asks_environment |= not reads.names.isdisjoint(("environ", "getenv", "environb"))
        elif not reads.names.isdisjoint(_REFLECTS | {"__dict__", "__getattribute__"}):
            self._learn_all()

    def code(self, code: types.CodeType) -> None:
        """All of it but for names of local variables, and where it lies in a file."""
        self.say(code_digest(code))

    def _read(
        self, chain: Chain, function: types.FunctionType, closure: dict[str, object], through: str
    ) -> None:
        """What a chain of names leads to, from where a function has it."""
        self.say(chain.root, chain.name, chain.level, *chain.attributes)
        value: object = _NOTHING
        if chain.root == "free":
            value = closure.get(chain.name, _NOTHING)
        elif chain.root == "global":
            value = function.__globals__.get(chain.name, _NOTHING)
            if value is _NOTHING:
                value = _builtins(function).get(chain.name, _NOTHING)
        else:
            value = self._imported(chain, function, through)
        for attribute in chain.attributes:
            if not isinstance(value, types.ModuleType):
                break
            home = home_of(value)
            through = {"torch": "torch", "python": through}.get(home.kind, home.name)
            value = self._member_of(value, attribute, home, through)
        if value is _NOTHING or (isinstance(value, types.ModuleType) and chain.root == "bind"):
            self.say("unbound")
        else:
            self.say(self._of(value, through))

    def _imported(self, chain: Chain, function: types.FunctionType, through: str) -> object:
        name = chain.name
        if chain.level:
            package = str(function.__globals__.get("__package__"))
            name = package.rsplit(".", chain.level - 1)[0] + (f".{name}" if name else "")
        if name in sys.modules:
            return sys.modules[name]
        root = name.partition(".")[0]
        named = root == "torch" or is_pure(root, "")
        if not named and (root in sys.modules or importlib.util.find_spec(root) is not None):
            self._refuse(f"imports {name}, which is not imported yet", through)
        return _NOTHING

    def _member_of(self, module: types.ModuleType, name: str, home: Home, through: str) -> object:
        if name in vars(module):
            return vars(module)[name]
        if home.kind == "user":
            if "__getattr__" in vars(module):
                self.say(self._of(vars(module)["__getattr__"], through))
            return _NOTHING
        return getattr(module, name, _NOTHING)

    def _native(self, value: object, through: str) -> None:
        """Functions in C: those of Python and torch are covered by their versions."""
        home = home_of(value)
        name = str(getattr(value, "__qualname__", ""))
        module = str(getattr(value, "__module__", None) or home.name or "builtins")
        self.say("native", module, name, home.name)
        owner = getattr(value, "__self__", None)
        if name.rpartition(".")[2] in self._asks and home.kind == "torch":
            self._ask(f"calls {_name(value)}", through)
        of_value = not isinstance(owner, (types.ModuleType, type(None)))
        if home.kind == "python" and not (of_value or is_pure(module, name)):
            self._refuse(f"calls {_name(value)}, which is not in Python", through)
        elif not home.is_named and not of_value:
            self._refuse(f"calls {_name(value)}, which is not in Python", through or home.name)
        if of_value:
            self.say(self._of(owner, through))

    # -- what has members

    def _wait(self, index: int, name: str, value: object, through: str) -> None:
        """Follow a member once it is named, if it is."""
        if self._reflects or name in self._names:
            self.say("member", index, name, self._of(value, through))
        else:
            self._waiting.setdefault(name, []).append((index, name, value, through))

    def _learn(self, names: Iterable[str]) -> None:
        new = set(names) - self._names
        self._names |= new
        for name in sorted(new & self._waiting.keys()):
            for each in self._waiting.pop(name):
                self._wait(*each)

    def _learn_all(self) -> None:
        """Names may be put together: any member may be asked for."""
        self._reflects = True
        waiting, self._waiting = self._waiting, {}
        for name in sorted(waiting):
            for each in waiting[name]:
                self._wait(*each)

    def _module(self, module: types.ModuleType, index: int, through: str) -> None:
        home = home_of(module)
        self.say("module", home.name)
        if home.kind == "python" and not is_pure(module.__name__, ""):
            self._refuse(f"refers to the module {module.__name__} as a whole", through)
        elif home.is_named:
            self.say(module.__name__)
        else:
            for name, value in sorted(vars(module).items()):
                if name == "__getattr__":
                    self.say(name, self._of(value, home.name))
                elif not _is_special(name):
                    self._wait(index, name, value, home.name)

    def _class(self, kind: type, index: int, through: str) -> None:
        home = home_of(kind)
        self.say("class", home.name)
        if home.is_named:
            self.say(_name(kind))
            computes = is_pure(kind.__module__, kind.__qualname__)
            if home.kind == "python" and not computes and not issubclass(kind, BaseException):
                self._refuse(f"refers to {_name(kind)}", through)
            for base in kind.__mro__:
                for name, member in vars(base).items() if base is not object else ():
                    function = _unbound(member)
                    if isinstance(function, types.FunctionType) and _is_patched(function):
                        self.say("patched", name, self._of(function, ""))
            return
        through = home.name
        self.say(*(self._of(base, "") for base in kind.__bases__), self._of(type(kind), ""))
        outside = [base for base in kind.__mro__[1:-1] if home_of(base).kind != "user"]
        for name, member in sorted(vars(kind).items()):
            if name in _ABOUT_CLASSES or isinstance(member, types.MemberDescriptorType):
                continue
            called = name not in _SELDOM and (_is_special(name) or not callable(_unbound(member)))
            if called or any(hasattr(base, name) for base in outside):
                self.say("member", index, name, self._of(member, through))
            else:
                self._wait(index, name, member, through)

    # -- values

    def _contents(self, value: object, through: str) -> None:
        """Of one of Python's containers, or of one derived from those."""
        if value is sys.modules:
            self._refuse("refers to all modules", through)
        elif isinstance(value, dict) and (place := _place_of_table(value)):
            # It grows while torch works. What others put there is a part of keys of its own.
            self.say("torch's", place)
        elif isinstance(value, (list, tuple)):
            parts: Iterator[object]
            parts = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
            self._all("items", parts, through)
        elif isinstance(value, dict):
            for key in dict.keys(value):
                self.say(self._of(key, through), self._of(dict.__getitem__(value, key), through))
            self.say("end")
        elif isinstance(value, (set, frozenset)):
            self.say("set", *sorted(self._alone(each, through) for each in value))

    def _alone(self, value: object, through: str) -> str:
        """A digest of something that has no place among its like."""
        if type(value) in _PLAIN:
            return self._of(value, through)
        walk = _Walk(self._asks, self._parts_of, self._depth + 1)
        if walk._depth > _MAX_NESTED_SETS:
            self._refuse("refers to too many sets, one in the other", "")
            return ""
        walk._names, walk._reflects = set(self._names), True
        walk.follow(value)
        if walk.untold:
            self._refuse(walk.untold, through)
        return walk.digest()

    def _of_python(self, value: object, through: str) -> bool:
        """Values of Python's library that keep their state to themselves; whether it is one."""
        if value is os.environ or value is getattr(os, "environb", None):
            self._asks_environment |= bool(through)
            self._refuse("reads the environment", through)
        elif isinstance(value, enum.Enum):
            self._all("enum", (type(value), value._name_, value._value_), through)
        elif isinstance(value, re.Pattern):
            self._all("pattern", (value.pattern, value.flags), through)
        elif isinstance(value, logging.Logger):
            self.say("logger")
        elif isinstance(value, _LOCKS):
            self.say("lock")
        elif isinstance(value, types.MappingProxyType):
            self._all("proxy", (dict(value),), through)
        elif isinstance(value, types.CellType):
            self._all("cell", (content_of(value),), through)
        elif isinstance(value, weakref.ReferenceType):
            self._all("weak", (type(value), value()), through)
        elif isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
            self._all("weak", (type(value), dict(value.items())), through)
        elif isinstance(value, weakref.WeakSet):
            self._all("weak", (type(value), set(value)), through)
        elif isinstance(value, contextvars.ContextVar):
            self.say("context")
            with contextlib.suppress(LookupError):
                self._all("value", [value.get()], through)
        else:
            return False
        return True

    def _of_torch(self, value: object, through: str) -> bool:
        """The same of torch's, and of numpy's."""
        import torch

        if (operator := internals.operator_of(value)) is not None:
            self._operator(operator, through)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, through)
        elif isinstance(value, torch.fx.GraphModule):
            made = internals.GENERATED.names
            state = {name: part for name, part in vars(value).items() if name not in made}
            self._all("graph", (type(value).__base__, type(value).forward, state), through)
        elif isinstance(value, torch.jit.ScriptFunction):
            text = re.sub(r" +#.*", "", str(value.inlined_graph))
            self.say("script", text)
            if "<Tensor" in text:
                self._refuse("refers to a scripted function with a tensor in it", through)
        elif type(value).__module__.partition(".")[0] == "numpy":
            return self._of_numpy(value, through)
        else:
            return False
        return True

    def _operator(self, operator: Operator | OperatorPacket, through: str) -> None:
        self.say("operator", operator)
        if isinstance(operator, internals.higher_order_operator.get()):
            kernels: dict[object, object] = getattr(operator, "py_kernels", {})
            self._all("kernels", (type(operator), *filter(_is_patched, kernels.values())), through)
        elif self._parts_of is not None:
            for each in internals.overloads_of(operator):
                try:
                    words, functions = self._parts_of(each)
                except UntoldError as exc:
                    home = home_of_file(internals.defined_at(each))
                    self._refuse(f"{each}: {exc}", through if home.kind == "library" else "")
                else:
                    self.say(each, *words)
                    self._all("parts", functions, "")

    def _tensor(self, value: Tensor, through: str) -> None:
        import torch

        self._all("tensor", (type(value), vars(value)), through)
        self.say(value.dtype, tuple(value.shape), value.device, value.requires_grad)
        plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        seen = plain and value.layout is torch.strided and not value.is_quantized
        if not seen or value.is_meta or value.numel() * value.element_size() > _MAX_BYTES:
            self._refuse("refers to a tensor that is large, or of a class of its own", through)
            return
        with internals.without_modes.get()(), torch.no_grad():
            data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self.say(hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest())

    def _of_numpy(self, value: object, through: str) -> bool:
        import numpy as np

        if isinstance(value, np.dtype):
            self.say("dtype", repr(value))
        elif type(value) is np.ndarray or isinstance(value, np.generic):
            array = np.asarray(value)
            self._all("array", (array.dtype, array.shape), through)
            if array.dtype.hasobject:
                self._all("objects", array.reshape(-1).tolist(), through)
            elif array.nbytes > _MAX_BYTES:
                self._refuse("refers to an array that is large", through)
            else:
                self.say(hashlib.sha256(array.tobytes()).hexdigest())
        elif callable(value):
            name = str(getattr(value, "__name__", ""))
            module = sys.modules.get(str(getattr(value, "__module__", None) or "numpy"))
            self.say("numpy", name, home_of(type(value)).name)
            if getattr(module, name, None) is not value:
                self._refuse(f"calls {_name(value)}, which is not in Python", through)
        else:
            return False
        return True

    def _object(self, value: object, through: str) -> None:
        kind = type(value)
        # What a class of Python's library can ask for, its objects cannot.
        self.say("object", _name(kind) if home_of(kind).kind == "python" else self._of(kind, ""))
        if isinstance(value, decimal.Decimal):
            context = decimal.getcontext()
            self.say(repr(context).partition(", flags=")[0])
        native = _native_base(kind)
        home = Home("user") if native is None else home_of(native)
        if isinstance(value, _VALUES):
            self.say(*(base.__repr__(value) for base in _VALUES if isinstance(value, base)))
        elif isinstance(value, _CONTAINERS):
            self._contents(value, through)
        if home.name.partition(" ")[0] in ("sympy", "mpmath"):
            self.say(repr(value))
        elif native is not None and home.kind == "python":
            self._reduced(value, native, through)
        elif native is not None:
            words = repr(value) if home_of(kind).kind == "torch" else " at 0x"
            self.say("" if " at 0x" in words else words)
            if " at 0x" in words:
                what = f"refers to a {_name(kind)}, whose state cannot be seen"
                self._refuse(what, through)
        state = dict(getattr(value, "__dict__", None) or {})
        slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
        if _is_symbolic(kind):  # they keep their hash(), and numbers drawn at random
            self.say(repr(value))
        else:
            self._all("state", (state, slots), through)

    def _reduced(self, value: object, native: type, through: str) -> None:
        """What pickling would make of an object of Python's library."""
        kind = type(value)
        if native.__module__ in ("random", "_random"):
            self._refuse(f"refers to a {_name(kind)}, which draws at random", through)
            return
        own = any(
            getattr(kind, name, None) is not getattr(native, name, None)
            for name in ("__reduce__", "__reduce_ex__", "__getstate__")
        )
        if own or native in _CONTAINERS:
            self._refuse(f"refers to a {_name(kind)}, which says itself what it is", through)
            return
        try:
            parts = value.__reduce_ex__(2)
        except TypeError:
            self._refuse(f"refers to a {_name(kind)}, whose state cannot be seen", through)
            return
        if isinstance(parts, str):
            self.say(parts)
            return
        make, args, state, items, pairs = (*parts, None, None, None)[:5]
        if home_of(make).kind == "python":
            self.say(_name(make))
            make, args = None, [each for each in args if each is not kind]
        given = (make, args, state, *([*each] if each else [] for each in (items, pairs)))
        self._all("reduced", given, through)


_NOTHING = object()


def _builtins(function: types.FunctionType) -> dict[str, object]:
    found: dict[str, object] = getattr(function, "__builtins__", None) or vars(builtins)
    return found


def _unbound(member: object) -> object:
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _is_patched(function: object) -> bool:
    """Whether a function is the user's: in a class or a table of torch's or Python's it was put."""
    if not isinstance(function, types.FunctionType):
        return False
    # What a class statement's decorators generate has no file.
    generated = function.__code__.co_filename.startswith("<")
    return not generated and home_of_file(function.__code__.co_filename).kind == "user"


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_symbolic(kind: type) -> bool:
    return home_of(kind).name.partition(" ")[0] in ("sympy", "mpmath")


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        for name, member in sorted(vars(base).items()):
            if isinstance(member, types.MemberDescriptorType):
                yield name


def _native_base(kind: type) -> type | None:
    """The class because of which objects have something that only C sees, if there is one."""
    for base in kind.__mro__:
        if base is object or base in _CONTAINERS or base in _VALUES:
            continue
        if not base.__flags__ & _HEAP_TYPE or base.__base__ is None:
            return base
        declared = vars(base).get("__slots__", ())
        slots = 1 if isinstance(declared, str) else len(list(declared))
        own = sum(name in vars(base) for name in ("__dict__", "__weakref__"))
        if base.__basicsize__ - base.__base__.__basicsize__ > 8 * (slots + own):
            return base
    return None


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what a class statement makes


def _name(value: object) -> str:
    home = getattr(value, "__module__", None)
    home = home if isinstance(home, str) else str(type(value).__module__)
    return f"{home}.{getattr(value, '__qualname__', type(value).__qualname__)}"
