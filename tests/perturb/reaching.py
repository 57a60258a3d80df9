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
    "globals": _written("", "globals()['VALUE']", told=False),
    "modules": _written(
        "import sys",
        "sys.modules['s3cache_reaching_place.sub'].VALUE",
        around=_in_modules,
        told=False,
    ),
}


# -- how code comes by it


def _deep(reads: str) -> str:
    last = f"def h19(): return {reads}\n"
    return last + "\n".join(f"def h{n}(): return h{n + 1}()" for n in range(18, -1, -1))


ROUTES: dict[str, tuple[Callable[[str], str], str]] = {
    "helper": (lambda reads: f"def helper(): return {reads}", "helper()"),
    "directly": (lambda reads: "", "{}"),
    "deep": (_deep, "h0()"),
    "table": (lambda reads: f"TABLE = {{'f': lambda: {reads}}}", "TABLE['f']()"),
    "method": (
        lambda reads: f"class O:\n    def read(self): return {reads}\nOBJECT = [O()]",
        "OBJECT[0].read()",
    ),
    "module": (lambda reads: f"def read(): return {reads}", f"{VALUES}.tools.read()"),
}


def _program(place: Place, route: str, hook: str, value: int) -> Program:
    define, read = ROUTES[route]

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        home = types.ModuleType(VALUES)
        with place.around(value), _imported_as({VALUES: home}):
            vars(home).update(place.names(value), torch=torch)
            exec(place.source, vars(home))
            exec(define(place.reads), vars(home))
            if route == "module":
                tools = types.ModuleType(f"{VALUES}.tools")
                vars(tools).update(vars(home))
                exec(define(place.reads), vars(tools))
                outer = types.ModuleType(VALUES)
                outer.tools = tools  # type: ignore[attr-defined]
                vars(home)[VALUES] = outer
            with HOOKS[hook].installed(vars(home), read.format(place.reads)):
                yield

    return Program(lambda: HOOKS[hook].make(), context)


def _combined() -> Iterator[tuple[str, str, str]]:
    """Each place with each route, and with each hook."""
    hooks, routes = list(HOOKS), list(ROUTES)
    for number, place in enumerate(PLACES):
        for route in routes:
            yield place, route, hooks[0]
        for index, hook in enumerate(hooks[1:]):
            yield place, routes[(number + index) % len(routes)], hook


def bases() -> dict[str, Program]:
    """Each combination with a first value; where no key can hold it, with a constant."""
    return {
        f"reach {place} {route} {hook}": _program(
            PLACES[place if PLACES[place].told else "constant"], route, hook, 2
        )
        for place, route, hook in _combined()
    }


def changes() -> Iterator[Change]:
    """The same with another value."""
    for place, route, hook in _combined():
        program = _program(PLACES[place], route, hook, 3)
        name = f"{place} {route} {hook}"
        yield Change("reaching", name, f"reach {name}", program)
