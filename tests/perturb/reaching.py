"""What code reads that runs while a graph is traced: places of a value, routes to it, and hooks.

Each program is made of three words of a grammar: where a value lives, how code comes by it, and
which code it is that torch runs while it traces. The change is the value.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import dataclasses
import decimal
import enum
import fractions
import functools
import operator
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.perturb.hooking import HOOKS, VALUES
from tests.perturb.program import Change, Program

__all__ = ["bases", "changes"]

Names = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a value lives.

    Attributes:
        names: what there is in a module, with this value in it.
        reads: the expression by which code there reads it.
        source: code that is run in that module, to define classes and functions.
        around: what surrounds a program with this value.
        told: whether a key can hold it; if not, a graph must not be cached.
    """

    names: Callable[[int], Names]
    reads: str
    source: str = ""
    around: Callable[[int], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    told: bool = True


def _of(make: Callable[[int], Any], reads: str = "G", **more: Any) -> Place:
    return Place(lambda value: {"G": make(value)}, reads, **more)


def _written(source: str, reads: str, **more: Any) -> Place:
    """Code with the value in it, or in ``VALUE`` where it is run."""
    return Place(lambda value: {"VALUE": value}, reads, source, **more)


def _module(**names: Any) -> types.ModuleType:
    module = types.ModuleType("s3cache_reaching_place")
    vars(module).update(names)
    return module


@dataclasses.dataclass(slots=True)
class Slotted:
    value: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: int = 0
    rest: tuple[int, ...] = ()


class Pair(tuple[int, int]):
    __slots__ = ()

    @property
    def value(self) -> int:
        return self[0]


class Holder:
    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        return self.value

    def __call__(self) -> int:
        return self.value


class Made(torch.nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> int:
        return self.value


_KEPT: list[Holder] = []


def _kept(value: int) -> Holder:
    """Something that lives, for what refers to it weakly."""
    _KEPT.append(Holder(value))
    return _KEPT[-1]


def _attributed(value: int) -> Any:
    def function() -> None: ...

    function.value = value  # type: ignore[attr-defined]
    return function


def _enumerated(value: int) -> Any:
    make: Any = enum.Enum
    return make("E", {"A": value}).A


def _closing_over(value: int) -> Callable[[], int]:
    return lambda: value


def _context_variable(value: int) -> contextvars.ContextVar[int]:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("s3cache")
    variable.set(value)
    return variable


def _scripted(value: int) -> Any:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(operator.mul, (graph.placeholder("x"), value)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _in_modules(value: int) -> contextlib.AbstractContextManager[Any]:
    package, inner = _module(), _module(VALUE=value)
    package.sub = inner  # type: ignore[attr-defined]
    vars(package)["__path__"] = []
    return _imported_as({"s3cache_reaching_place": package, "s3cache_reaching_place.sub": inner})


@contextlib.contextmanager
def _imported_as(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """As ``patch.dict``, which also takes back what is imported meanwhile."""
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _in_environment(value: int) -> contextlib.AbstractContextManager[Any]:
    return patch.dict(os.environ, {"S3CACHE_REACHING": str(value)})


def _random(value: int) -> Any:
    import random

    return random.Random(value)


def _generator(value: int) -> Any:
    return (value for _ in range(1000))


def _with_state(kind: Any, value: int) -> Any:
    made = kind()
    made.value = value
    return made


def _with_items(queue: Any, value: int) -> Any:
    queue.put(value)
    return queue


def _with_buffer(value: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.zeros(value))
    return module


def _hooked(value: int) -> torch.nn.Module:
    module = Made(0)
    module.register_forward_hook(lambda *_: value)
    return module


@contextlib.contextmanager
def _hooking_all(value: int) -> Iterator[None]:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return value if output == "any" else None

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _forwarding(value: int) -> torch.nn.Module:
    module = Made(0)
    module.forward = lambda: value  # type: ignore[method-assign]
    return module


def _script(value: int) -> Any:
    return torch.jit.CompilationUnit(f"def f(x: Tensor):\n    return x * {value}\n").f


def _coroutine(value: int) -> Any:
    async def wait(value: int) -> int:
        return value

    return wait(value)


def _threads_own(value: int) -> Any:
    import threading

    return _with_state(threading.local, value)


def _imported(statement: str, reads: str) -> Place:
    source = f"def imported():\n    {statement}\n    return {reads}"
    return _written(source, "imported()", around=_in_modules)


_CLASS = "class C:\n    {}\nG = C()"

PLACES: dict[str, Place] = {
    "constant": _of(int),
    "float": _of(float, "int(G)"),
    "text": _of(lambda v: "x" * v, "len(G)"),
    "bytes": _of(bytes, "len(G)"),
    "bytearray": _of(bytearray, "len(G)"),
    "complex": _of(lambda v: complex(v, 1), "int(G.real)"),
    "list": _of(lambda v: [v], "G[0]"),
    "list in a list": _of(lambda v: [[], [[v]]], "G[1][0][0]"),
    "tuple": _of(lambda v: (1, v), "G[1]"),
    "set": _of(lambda v: {0, v}, "max(G)"),
    "frozen set": _of(lambda v: frozenset({0, v}), "max(G)"),
    "dict": _of(lambda v: {"k": v}, "G['k']"),
    "order of a dict": _of(lambda v: {v: 0, 5 - v: 0}, "next(iter(G))"),
    "dict by number": _of(lambda v: {1: {2: v}}, "G[1][2]"),
    "ordered dict": _of(lambda v: collections.OrderedDict(k=v), "G['k']"),
    "default dict": _of(lambda v: collections.defaultdict(_closing_over(v)), "G['k']"),
    "counter": _of(lambda v: collections.Counter("x" * v), "G['x']"),
    "chain of dicts": _of(lambda v: collections.ChainMap({}, {"k": v}), "G['k']"),
    "user dict": _of(lambda v: collections.UserDict(k=v), "G['k']"),
    "proxy": _of(lambda v: types.MappingProxyType({"k": v}), "G['k']"),
    "namespace": _of(lambda v: types.SimpleNamespace(value=v), "G.value"),
    "deque": _of(lambda v: collections.deque([v]), "G[0]"),
    "longest deque": _of(lambda v: collections.deque(maxlen=v), "G.maxlen"),
    "array": _of(lambda v: array.array("i", [v]), "G[0]"),
    "range": _of(range, "len(G)"),
    "slice": _of(slice, "G.stop"),
    "decimal": _of(decimal.Decimal, "int(G)"),
    "fraction": _of(lambda v: fractions.Fraction(v, 1), "int(G)"),
    "numpy scalar": _of(np.int64, "int(G)"),
    "numpy float": _of(np.float32, "int(G)"),
    "numpy array": _of(lambda v: np.array([v, 1]), "int(G[0])"),
    "numpy objects": _of(lambda v: np.array([[v], None], dtype=object), "G[0][0]"),
    "slotted": _of(Slotted, "G.value"),
    "dataclass": _of(Frozen, "G.value"),
    "field of a dataclass": _of(lambda v: Frozen(rest=(v,)), "G.rest[0]"),
    "derived tuple": _of(lambda v: Pair((v, 0)), "G.value"),
    "named tuple": _of(collections.namedtuple("Named", "value"), "G.value"),  # noqa: PYI024
    "object": _of(Holder, "G.value"),
    "method": _of(Holder, "G.get()"),
    "bound method": _of(lambda v: Holder(v).get, "G()"),
    "callable": _of(Holder, "G()"),
    "module of torch": _of(Made, "G()"),
    "modules in one": _of(lambda v: torch.nn.Sequential(Made(v)), "G[0].value"),
    "size of a layer": _of(lambda v: torch.nn.Linear(v, 1), "G.in_features"),
    "tensor": _of(lambda v: torch.zeros(v), "G.shape[0]"),
    "item getter": _of(operator.itemgetter, "G([0, 1, 2, 3, 4])"),
    "attribute getter": _of(
        lambda v: operator.attrgetter("real" if v == 2 else "imag"), "int(G(2 + 3j))"
    ),
    "method caller": _of(lambda v: operator.methodcaller("count", "x" * (v - 1)), "G('xx') + 1"),
    "partial": _of(lambda v: functools.partial(max, v), "G(0)"),
    "keyword of a partial": _of(lambda v: functools.partial(int, base=v), "G('10')"),
    "attribute of a function": _of(_attributed, "G.value"),
    "closure": _of(_closing_over, "G()"),
    "closure in a closure": _of(lambda v: _closing_over(_closing_over(v)), "G()()"),  # type: ignore[arg-type]
    "cached function": _of(lambda v: functools.lru_cache(_closing_over(v)), "G()"),
    "graph module": _of(_scripted, "G(1)"),
    "weak reference": _of(lambda v: weakref.ref(_kept(v)), "G().value"),
    "weak values": _of(lambda v: weakref.WeakValueDictionary(k=_kept(v)), "G['k'].value"),
    "context variable": _of(_context_variable, "G.get()"),
    "pattern": _of(lambda v: __import__("re").compile("x" * v), "len(G.pattern)"),
    "exception": _of(lambda v: ValueError(v), "G.args[0]"),
    "iterable of a list": _of(lambda v: iter([v] * 1000), "next(G)"),
    "module": _of(lambda v: _module(VALUE=v), "G.VALUE"),
    "nested module": _of(lambda v: _module(sub=_module(VALUE=v)), "G.sub.VALUE"),
    "list of a module": _of(lambda v: _module(sub=_module(VALUES=[v])), "G.sub.VALUES[0]"),
    "module in a list": _of(lambda v: [_module(VALUE=v)], "G[0].VALUE"),
    "module by name": _of(lambda v: _module(VALUE=v), "getattr(G, 'VAL' + 'UE')"),
    "module of a module": _of(lambda v: _module(sub=_module(VALUE=v)), "vars(G)['sub'].VALUE"),
    "attribute of torch": _written(
        "import torch\n",
        "torch.s3cache_reaching",
        around=lambda v: patch.object(torch, "s3cache_reaching", v, create=True),
    ),
    "import": _imported("import s3cache_reaching_place", "s3cache_reaching_place.sub.VALUE"),
    "import as": _imported("import s3cache_reaching_place.sub as it", "it.VALUE"),
    "import from": _imported("from s3cache_reaching_place.sub import VALUE", "VALUE"),
    "import a module from": _imported("from s3cache_reaching_place import sub", "sub.VALUE"),
    "default": _written("def G(value=VALUE): return value", "G()"),
    "keyword default": _written("def G(*, value=VALUE): return value", "G()"),
    "class attribute": _written(_CLASS.format("value = VALUE"), "G.value"),
    "of a class": _written(_CLASS.format("value = VALUE"), "C.value"),
    "property": _written(_CLASS.format("value = property(lambda self: VALUE)"), "G.value"),
    "static method": _written(_CLASS.format("value = staticmethod(lambda: VALUE)"), "C.value()"),
    "class method": _written(_CLASS.format("value = classmethod(lambda c: VALUE)"), "C.value()"),
    "any attribute": _written(_CLASS.format("def __getattr__(self, n): return VALUE"), "G.any"),
    "length": _written(_CLASS.format("def __len__(self): return VALUE"), "len(G)"),
    "descriptor": _written(
        "class D:\n    def __get__(self, *_): return VALUE\n" + _CLASS.format("value = D()"),
        "G.value",
    ),
    "base class": _written(
        "class B:\n    def get(self): return VALUE\nclass C(B): ...\nG = C()", "G.get()"
    ),
    "super": _written(
        "class B:\n    def get(self): return VALUE\n"
        "class C(B):\n    def get(self): return super().get()\nG = C()",
        "G.get()",
    ),
    "meta class": _written(
        "class M(type):\n    def get(cls): return VALUE\nclass C(metaclass=M): ...", "C.get()"
    ),
    "function of another": _written("def g(): return VALUE\ndef f(): return g", "f()()"),
    "nested function": _written("def f():\n    def g(): return VALUE\n    return g()", "f()"),
    "text of a function": _written("def f(): ...\nf.__doc__ = 'x' * VALUE", "len(f.__doc__)"),
    "name of a function": _written("def f(): ...\nf.__name__ = 'x' * VALUE", "len(f.__name__)"),
    "decorated": _written(
        "import functools\ndef d(f):\n    @functools.wraps(f)\n"
        "    def inner(): return f() + VALUE\n    return inner\n@d\ndef f(): return 0",
        "f()",
    ),
    "by kind": _written(
        "import functools\n@functools.singledispatch\ndef f(x): return 0\n"
        "@f.register\ndef _(x: int): return VALUE",
        "f(1)",
    ),
    "enumeration": _of(lambda v: _enumerated(v), "G.value"),
    "dict of functions": _of(lambda v: {"f": _closing_over(v), 3: len}, "G['f']()"),
    "derived number": _of(type("Number", (int,), {}), "int(G)"),
    "derived text": _of(lambda v: type("Text", (str,), {})("x" * v), "len(G)"),
    "derived list": _of(lambda v: type("List", (list,), {})([v]), "G[0]"),
    "state of a derived list": _of(lambda v: _with_state(type("List", (list,), {}), v), "G.value"),
    "state of a derived dict": _of(lambda v: _with_state(type("Dict", (dict,), {}), v), "G.value"),
    "missing of a dict": _written(
        "class D(dict):\n    def __missing__(self, key): return VALUE\nG = D()", "G['k']"
    ),
    "cached property": _written(
        "import functools\n"
        + _CLASS.format("value = functools.cached_property(lambda self: VALUE)"),
        "G.value",
    ),
    "cached method": _written(
        "import functools\n" + _CLASS.format("get = functools.cache(lambda self: VALUE)"),
        "G.get()",
    ),
    "partial method": _written(
        "import functools\n"
        + _CLASS.format("def f(self, v): return v\n    get = functools.partialmethod(f, VALUE)"),
        "G.get()",
    ),
    "method by kind": _written(
        "import functools\n"
        + _CLASS.format(
            "@functools.singledispatchmethod\n    def get(self, x): return 0\n"
            "    @get.register\n    def _(self, x: int): return VALUE"
        ),
        "G.get(1)",
    ),
    "default of a dataclass": _written(
        "import dataclasses\n@dataclasses.dataclass\nclass D:\n    value: int = VALUE", "D().value"
    ),
    "factory of a dataclass": _written(
        "import dataclasses\n@dataclasses.dataclass\nclass D:\n"
        "    value: list = dataclasses.field(default_factory=lambda: [VALUE])",
        "D().value[0]",
    ),
    "after the making of a dataclass": _written(
        "import dataclasses\n@dataclasses.dataclass\nclass D:\n    value: int = 0\n"
        "    def __post_init__(self): self.value = VALUE",
        "D().value",
    ),
    "slot of a base": _written(
        "class B:\n    __slots__ = ('value',)\nclass C(B):\n    __slots__ = ()\n"
        "G = C()\nG.value = VALUE",
        "G.value",
    ),
    "abstract": _written(
        "import abc\nclass B(abc.ABC):\n    @abc.abstractmethod\n    def get(self): ...\n"
        "    def twice(self): return self.get()\n"
        "class C(B):\n    def get(self): return VALUE\nG = C()",
        "G.twice()",
    ),
    "mixed in": _written(
        "class A:\n    def get(self): return self.value\nclass B:\n    value = VALUE\n"
        "class C(A, B): ...",
        "C().get()",
    ),
    "order of bases": _written(
        "class A:\n    value = 2\nclass B:\n    value = 3\n"
        "class C(*((A, B) if VALUE == 2 else (B, A))): ...",
        "C.value",
    ),
    "made by a meta class": _written(
        "class M(type):\n    def __call__(cls): return VALUE\nclass C(metaclass=M): ...", "C()"
    ),
    "property of a meta class": _written(
        "class M(type):\n    value = property(lambda cls: VALUE)\nclass C(metaclass=M): ...",
        "C.value",
    ),
    "item of a class": _written(_CLASS.format("def __class_getitem__(c, k): return VALUE"), "C[0]"),
    "made of a class": _written("class C:\n    def __new__(cls): return [VALUE]", "C()[0]"),
    "at the making of a class": _written(
        "class B:\n    def __init_subclass__(cls, value): cls.value = value\n"
        "class C(B, value=VALUE): ...",
        "C.value",
    ),
    "name told to a descriptor": _written(
        "class D:\n    def __set_name__(self, owner, name): self.value = VALUE\n"
        "    def __get__(self, *_): return self.value\n" + _CLASS.format("value = D()"),
        "G.value",
    ),
    "item": _written(_CLASS.format("def __getitem__(self, k): return VALUE"), "G[0]"),
    "in": _written(
        _CLASS.format("def __contains__(self, k): return k == VALUE"), "2 if 2 in G else 3"
    ),
    "sum": _written(_CLASS.format("def __radd__(self, k): return k + VALUE"), "0 + G"),
    "equality": _written(
        _CLASS.format("def __eq__(self, k): return k == VALUE"), "2 if G == 2 else 3"
    ),
    "truth": _written(_CLASS.format("def __bool__(self): return VALUE == 2"), "2 if G else 3"),
    "index": _written(_CLASS.format("def __index__(self): return VALUE"), "range(9)[G]"),
    "iterated": _written(_CLASS.format("def __iter__(self): return iter([VALUE])"), "[*G][0]"),
    "entered": _written(
        _CLASS.format("def __enter__(self): return VALUE\n    def __exit__(self, *_): ...")
        + "\ndef f():\n    with G as value: return value",
        "f()",
    ),
    "formatted": _written(
        _CLASS.format("def __format__(self, how): return str(VALUE)"), "int(f'{G}')"
    ),
    "any attribute at all": _written(
        _CLASS.format("def __getattribute__(self, n): return VALUE"), "G.any", told=False
    ),
    "function in a function": _written(
        "def f(value):\n    def g(): return value\n    return g\nG = [f(VALUE)]", "G[0]()"
    ),
    "annotation": _written("def f(x: VALUE): ...", "f.__annotations__['x']"),
    "annotation of a class": _written("class C:\n    x: VALUE\n", "C.__annotations__['x']"),
    "lambda's default": _written("G = lambda value=[VALUE]: value[0]", "G()"),
    "counted": _written("G = [0] * VALUE", "sum(1 for _ in G)"),
    "sorted by": _written("G = lambda n: abs(n - VALUE)", "sorted([2, 3], key=G)[0]"),
    "reduced by": _written(
        "import functools\nG = lambda a, b: VALUE", "functools.reduce(G, [0, 0])"
    ),
    "mapped": _written("G = {1: VALUE}.get", "[*map(G, [1])][0]"),
    "bound to a dict": _of(lambda v: {"k": v}.__getitem__, "G('k')"),
    "bound to a text": _of(lambda v: ("x" * v).count, "G('x')"),
    "name of a module": _of(lambda v: types.ModuleType("x" * v), "len(G.__name__)"),
    "attribute of a module by function": _written(
        "import types\nG = types.ModuleType('user')\nG.__getattr__ = lambda n: VALUE", "G.any"
    ),
    "flags": _of(lambda v: enum.IntFlag("F", {"A": 1, "B": 2})(v), "int(G)"),  # type: ignore[operator]
    "number of an enumeration": _of(lambda v: enum.IntEnum("E", {"A": v}).A, "int(G)"),  # type: ignore[attr-defined]
    "time delta": _of(lambda v: __import__("datetime").timedelta(v), "G.days"),
    "date": _of(lambda v: __import__("datetime").date(2000, 1, v), "G.day"),
    "path": _of(lambda v: __import__("pathlib").PurePosixPath(*"x" * v), "len(G.parts)"),
    "unique number": _of(lambda v: __import__("uuid").UUID(int=v), "int(G)", told=False),
    "address": _of(lambda v: __import__("ipaddress").ip_address(v), "int(G)"),
    "structure": _of(lambda v: __import__("struct").Struct(f"{v}x"), "G.size", told=False),
    "memory": _of(lambda v: memoryview(bytes(v)), "len(G)", told=False),
    "template": _of(lambda v: __import__("string").Template("x" * v), "len(G.template)"),
    "queue": _of(lambda v: _with_items(__import__("queue").Queue(), v), "G.queue[0]"),
    "weak keys": _of(lambda v: weakref.WeakKeyDictionary({_kept(v): v}), "[*G.values()][0]"),
    "weak set": _of(lambda v: weakref.WeakSet([_kept(v)]), "[*G][0].value"),
    "weak method": _of(lambda v: weakref.WeakMethod(_kept(v).get), "G()()"),
    "typed tuple": _written(
        "import typing\nclass N(typing.NamedTuple):\n    value: int = VALUE\nG = N()", "G.value"
    ),
    "size of torch": _of(lambda v: torch.Size([v]), "G[0]"),
    "kind of number": _of(
        lambda v: torch.float32 if v == 2 else torch.float64, "G.itemsize // 4 + 1"
    ),
    "layout": _of(
        lambda v: torch.contiguous_format if v == 2 else torch.channels_last,
        "2 if G == torch.contiguous_format else 3",
    ),
    "shape of a parameter": _of(lambda v: torch.nn.Parameter(torch.zeros(v)), "len(G)"),
    "numbers of a tensor": _of(lambda v: torch.full((2,), v).tolist(), "G[1]"),
    "list of parameters": _of(lambda v: torch.nn.ParameterList([torch.zeros(1)] * v), "len(G)"),
    "dict of modules": _of(lambda v: torch.nn.ModuleDict({"k": Made(v)}), "G['k'].value"),
    "buffer of a module": _of(lambda v: _with_buffer(v), "G.kept.shape[0]"),
    "hook of a module": _of(lambda v: _hooked(v), "G()"),
    "forward of a module": _of(lambda v: _forwarding(v), "G()"),
    "rate of dropout": _of(lambda v: torch.nn.Dropout(v / 10), "int(G.p * 10)"),
    "training": _of(lambda v: torch.nn.ReLU().train(v == 2), "2 if G.training else 3"),
    "numpy structure": _of(lambda v: np.array([(v,)], dtype=[("k", "i4")]), "int(G['k'][0])"),
    "numpy view": _of(lambda v: np.array([0, v, 0])[1:], "int(G[0])"),
    "numpy type": _of(lambda v: np.dtype(f"i{4 * (v - 1)}"), "G.itemsize // 4 + 1"),
    "numpy shape": _of(lambda v: np.empty((v, 0)), "G.shape[0]"),
    "scripted function": _of(lambda v: _script(v), "int(G(torch.ones(())))"),
    "symbol": _of(lambda v: __import__("sympy").Integer(v), "int(G)"),
    "code after a jump": _written(
        "def f(n=9):\n    for n in range(n):\n        if n == VALUE: break\n    return n", "f()"
    ),
    "caught": _written(
        "def f():\n    try: raise KeyError(VALUE)\n    except KeyError as e: return e.args[0]",
        "f()",
    ),
    "matched": _written(
        "def f():\n    match VALUE:\n        case 2: return 2\n        case _: return 3", "f()"
    ),
    "unpacked": _written("G = (0, VALUE)\ndef f(a, b): return b", "f(*G)"),
    "unpacked by name": _written("G = {'b': VALUE}\ndef f(b): return b", "f(**G)"),
    "deleted name": _written("G = VALUE\nH = G\ndel G", "H"),
    "shadowed builtin": _written("len = lambda x: VALUE", "len('xx')"),
    "starred": _written("A, *G = 0, VALUE, VALUE", "G[-1]"),
    "global of a helper": _written(
        "import types\nG = types.FunctionType((lambda: it).__code__, {'it': VALUE})",
        "G()",
    ),
    "recursion": _written("def f(n=9): return n if n == VALUE else f(n - 1)", "f()"),
    # what is said elsewhere than where it is read
    "names of arguments": _written(
        "f = (lambda a, b: a) if VALUE == 2 else (lambda b, a: b)", "f(a=2, b=3)"
    ),
    "names of keywords": _written(
        "f = (lambda *, a, b: a) if VALUE == 2 else (lambda *, b, a: b)", "f(a=2, b=3)"
    ),
    "names of arguments of a method": _written(
        "class C:\n    f = (lambda s, a, b: a) if VALUE == 2 else (lambda s, b, a: b)\nG = C()",
        "G.f(b=3, a=2)",
    ),
    "subclass": _written("class B: ...\nclass C(B): value = VALUE", "B.__subclasses__()[0].value"),
    "number of subclasses": _written(
        "class B: ...\nKEPT = [type('C', (B,), {}) for _ in range(VALUE)]",
        "len(B.__subclasses__())",
    ),
    "registered with an abstract class": _written(
        "import abc\nclass B(abc.ABC): ...\nclass C: ...\nG = C()\nif VALUE == 2: B.register(C)",
        "2 if isinstance(G, B) else 3",
    ),
    "registered with one of Python's": _written(
        "import collections.abc\nclass C: ...\nG = C()\n"
        "if VALUE == 2: collections.abc.Sequence.register(C)",
        "2 if isinstance(G, collections.abc.Sequence) else 3",
    ),
    "slots": _written(
        "C = type('C', (), {'__slots__': ['a', 'b', 'c'][:VALUE]})", "len(C.__slots__)"
    ),
    "hint": _written(
        "import typing\ndef f(x): ...\nf.__annotations__ = {'x': typing.Annotated[int, VALUE]}",
        "typing.get_type_hints(f, include_extras=True)['x'].__metadata__[0]",
    ),
    "signature": _written(
        "import inspect\ndef f(x): ...\nf.__annotations__ = {'return': VALUE}",
        "inspect.signature(f).return_annotation",
    ),
    "text by inspection": _written(
        "import inspect\ndef f(): ...\nf.__doc__ = 'x' * VALUE", "len(inspect.getdoc(f))"
    ),
    "name of a class": _written("C = type('C' * VALUE, (), {})", "len(C.__name__)"),
    "name of an object's class": _written(
        "G = type('C' * VALUE, (), {})()", "len(type(G).__name__)"
    ),
    "name by text": _written("C = type('C' * VALUE, (), {})", "str(C).count('C')"),
    "attribute of an enumeration": _written(
        "import enum\nclass E(enum.Enum): A = 1\nE.A.later = VALUE", "E.A.later"
    ),
    "strides": _of(lambda v: torch.zeros(2, 6).as_strided((2, 2), (6, v)), "G.stride(1)"),
    "offset": _of(lambda v: torch.zeros(6)[v : v + 2], "G.storage_offset()"),
    "numpy strides": _of(lambda v: np.zeros(9, "u1")[::v][:2], "G.strides[0]"),
    "container of a pytree": _written(
        "import torch.utils._pytree as pytree\nclass Box: ...\nG = Box()\n"
        "pytree.register_pytree_node(Box, lambda b: ([VALUE], None), lambda c, _: Box())",
        "pytree.tree_leaves(G)[0]",
    ),
    "hook of all modules": _written(
        "G = torch.nn.Identity()", "G('any')", around=lambda v: _hooking_all(v)
    ),
    # what no key can hold
    "environment": _written(
        "import os", "int(os.environ['S3CACHE_REACHING'])", around=_in_environment, told=False
    ),
    "environment by function": _written(
        "from os import getenv",
        "int(getenv('S3CACHE_REACHING'))",
        around=_in_environment,
        told=False,
    ),
    "file": _written("import pathlib", "len(pathlib.Path.cwd().parts) * 0 + VALUE", told=False),
    "time": _written("import time", "int(time.time() * 0) + VALUE", told=False),
    "random": _of(_random, "G.randint(2, 2)", told=False),
    "generator": _of(_generator, "next(G)", told=False),
    "source": _written("", "eval('VALUE')", told=False),
    "coroutine": _of(_coroutine, "G.cr_frame.f_locals['value']", told=False),
    "frame": _written("import sys", "sys._getframe(1).f_lineno * 0 + VALUE", told=False),
    "thread's own": _of(_threads_own, "G.value", told=False),
    "numpy's random": _of(np.random.default_rng, "int(G.integers(2, 3))", told=False),
    "torch's random": _of(
        lambda v: torch.Generator().manual_seed(v), "G.initial_seed()", told=False
    ),
    "local names": _written("", "(lambda value: locals()['value'])(VALUE)", told=False),
    "executed": _written("", "exec('R = VALUE') or 2", told=False),
    "object of a library in C": _of(
        lambda v: __import__("yaml").CLoader("x" * v), "len(str(G)) * 0 + 2", told=False
    ),
    "standing in for a tensor": _of(lambda v: torch.zeros(v, device="meta"), "len(G)", told=False),
    "globals": _written("", "globals()['VALUE']", told=False),
    "modules": _written(
        "import sys",
        "sys.modules['s3cache_reaching_place.sub'].VALUE",
        around=_in_modules,
        told=False,
    ),
}


# torch numbers hooks of modules, one after the other.
_COUNTED = ("hook of a module",)


# -- how code comes by it


def _deep(reads: str) -> str:
    last = f"def h19(): return {reads}\n"
    return last + "\n".join(f"def h{n}(): return h{n + 1}()" for n in range(18, -1, -1))


ROUTES: dict[str, tuple[Callable[[str], str], str]] = {
    "helper": (lambda reads: f"def helper(): return {reads}", "helper()"),
    "directly": (lambda reads: "", "({})"),
    "deep": (_deep, "h0()"),
    "table": (lambda reads: f"TABLE = {{'f': lambda: {reads}}}", "TABLE['f']()"),
    "method": (
        lambda reads: f"class O:\n    def read(self): return {reads}\nOBJECT = [O()]",
        "OBJECT[0].read()",
    ),
    "module": (lambda reads: f"def read(): return {reads}", f"{VALUES}.tools.read()"),
    "base class": (
        lambda reads: (
            f"class Reads:\n    def read(self): return {reads}\nclass O(Reads):\n"
            "    def read(self): return super().read()\nOBJECT = O()"
        ),
        "OBJECT.read()",
    ),
    "property": (
        lambda reads: f"class O:\n    read = property(lambda self: {reads})\nOBJECT = O()",
        "OBJECT.read",
    ),
    "partial": (
        lambda reads: f"import functools\nPART = functools.partial(lambda _: {reads}, 0)",
        "PART()",
    ),
    "decorated": (
        lambda reads: (
            "import functools\ndef through(f):\n    @functools.wraps(f)\n"
            f"    def inner(): return f()\n    return inner\n@through\ndef read(): return {reads}"
        ),
        "read()",
    ),
    "comprehension": (lambda reads: "", "[{} for _ in (0,)][0]"),
    "module of torch": (
        lambda reads: (
            f"class O(torch.nn.Module):\n    def forward(self): return {reads}\n"
            "OBJECT = torch.nn.Sequential()\nOBJECT.inner = O()"
        ),
        "OBJECT.inner()",
    ),
    "closure": (
        lambda reads: (
            f"def make():\n    inner = lambda: {reads}\n    return lambda: inner()\nG1 = make()"
        ),
        "G1()",
    ),
    "attribute of a function": (
        lambda reads: f"def bears(): ...\nbears.read = lambda: {reads}",
        "bears.read()",
    ),
}


def _run(source: str, module: types.ModuleType) -> None:
    exec(compile(source, "<string>", "exec", dont_inherit=True), vars(module))


def _program(place: Place, route: str, hook: str, value: int) -> Program:
    define, read = ROUTES[route]

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        home = types.ModuleType(VALUES)
        with place.around(value), _imported_as({VALUES: home}):
            vars(home).update(place.names(value), torch=torch)
            _run(place.source, home)
            _run(define(place.reads), home)
            if route == "module":
                tools = types.ModuleType(f"{VALUES}.tools")
                vars(tools).update(vars(home))
                _run(define(place.reads), tools)
                outer = types.ModuleType(VALUES)
                outer.tools = tools  # type: ignore[attr-defined]
                vars(home)[VALUES] = outer
            with HOOKS[hook].installed(vars(home), read.format(place.reads)):
                yield

    return Program(lambda: HOOKS[hook].make(), context)


def _combined() -> Iterator[tuple[str, str, str]]:
    """Each place with each route, for one hook; with each hook, by one of the routes."""
    hooks, routes = list(HOOKS), list(ROUTES)
    for number, place in enumerate(PLACES):
        for route in routes:
            yield place, route, hooks[0]
        for index, hook in enumerate(hooks[1:]):
            yield place, routes[(number + index) % len(routes)], hook


def bases() -> dict[str, Program]:
    """Each combination with a first value."""
    return {
        f"reach {place} {route} {hook}": _program(PLACES[place], route, hook, 2)
        for place, route, hook in _combined()
    }


def changes() -> Iterator[Change]:
    """The same with another value; and, a third of them, with everything made anew."""
    for number, (name, route, hook) in enumerate(_combined()):
        place, base = PLACES[name], f"{name} {route} {hook}"
        program = _program(place, route, hook, 3)
        yield Change("reaching", base, f"reach {base}", program, told=place.told)
        if number % 3 == 0 and place.told and name not in _COUNTED:
            again = _program(place, route, hook, 2)
            yield Change("reaching", f"{base} again", f"reach {base}", again, same=True)
