"""Programs in which one thing that Dynamo reads differs between two variants.

A program is the text of a module: ``f`` is compiled, ``run(g)`` calls it (by default ``g(x)``), and
``options`` are those of ``torch.compile``. The variants differ by the value of ``V`` (0, then 1),
by a call of ``change()``, or in the text itself, ``<<one||other>>``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

_GIVEN = """\
import abc, collections, contextlib, contextvars, copy, dataclasses, enum, functools, inspect
import itertools, math, operator, os, random, string, sys, threading, types, typing, warnings, weakref
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
from torch import Tensor
from tests.features.recall.given import *
"""


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        family: the kind of the difference.
        name: the difference; begins with the family.
        text: the text of the module, without its imports.
    """

    family: str
    name: str
    text: str

    def source(self, variant: str) -> str:
        """Return the module's text; in most programs the variants have the same text."""
        choice = r"\2" if variant == "B" else r"\1"
        more = ""
        if self.family == "distributed":  # its imports take long
            more = "from tests.features.recall.given_distributed import *\n"
        return _GIVEN + more + re.sub(r"<<(.*?)\|\|(.*?)>>", choice, self.text, flags=re.DOTALL)

    @property
    def is_live(self) -> bool:
        """Whether the change can be made within a process."""
        return "def change" in self.text


def programs_in(path: Path) -> list[Program]:
    """Return the programs of a file; their family is its name."""
    parts = re.split(r"^#: ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    split = [part.partition("\n") for part in parts]
    return [Program(path.stem, f"{path.stem}/{name}", text) for name, _, text in split]


@functools.cache
def all_programs() -> tuple[Program, ...]:
    """Return every program: those in files, and a value of each kind in several places."""
    found = [*_generated()]
    for path in sorted(Path(__file__).with_name("programs").glob("*.txt")):
        found += programs_in(path)
    names = [program.name for program in found]
    assert len(names) == len({*names}), "two programs have one name"
    return tuple(found)


# -- values in places

# An expression with a value for each variant, `<<one||other>>`, and one that uses it as T.
_KINDS = {
    "torch function": ("torch.<<sin||cos>>", "T(x)"),
    "function of nn": ("F.<<relu||gelu>>", "T(x)"),
    "python function": ("<<double||triple>>", "T(x)"),
    "lambda": ("lambda v: v + <<1||2>>", "T(x)"),
    "closure": ("made(<<2||3>>.0)", "T(x)"),
    "default": ("defaulted(<<2||3>>.0)", "T(x)"),
    "keyword default": ("keyworded(<<2||3>>.0)", "T(x)"),
    "argument of a partial": ("functools.partial(torch.mul, other=<<2||3>>)", "T(x)"),
    "function of a partial": ("functools.partial(torch.<<add||sub>>, 1)", "T(x)"),
    "closure in a partial": ("functools.partial(made(<<2||3>>.0))", "T(x)"),
    "bound method": ("Scaler(<<2||3>>.0).apply", "T(x)"),
    "callable object": ("Scaler(<<2||3>>.0)", "T(x)"),
    "attribute": ("Scaler(<<2||3>>.0)", "x * T.by"),
    "class": ("classed(<<2||3>>.0)", "x * T.k"),
    "method of a class": ("classed(<<2||3>>.0)", "T().apply(x)"),
    "static method": ("classed(<<2||3>>.0)", "T.still(x)"),
    "object of a class": ("classed(<<2||3>>.0)()", "T.apply(x)"),
    "module": ("nn.<<ReLU||GELU>>()", "T(x)"),
    "option of a module": ("nn.LeakyReLU(0.<<1||2>>)", "T(x)"),
    "layers": ("nn.Sequential(nn.Sigmoid()<<||, nn.Sigmoid()>>)", "T(x)"),
    "order of layers": (
        "nn.Sequential(nn.<<ReLU(), nn.Tanh(), nn.Softplus||Softplus(), nn.Tanh(), nn.ReLU>>())",
        "T(x)",
    ),
    "int": ("<<2||3>>", "x * T"),
    "float": ("<<2||3>>.0", "x * T"),
    "near float": ("2.<<0||0625>>", "x * T"),
    "sign of zero": ("<<||->>0.0", "x * math.copysign(1.0, T)"),
    "infinity": ("math.<<inf||nan>>", "x.clamp(max=1) if T > 0 else x + 2"),
    "bool and int": ("<<1||True>>", "x + 1 if T is True else x + 2"),
    "int and float": ("1<<||.0>>", "x.to(torch.int32) + T"),
    "large int": ("2**70<<|| + 1>>", "x + T % 2"),
    "text": ("'<<sin||cos>>'", "getattr(torch, T)(x)"),
    "text of another kind": ("<<||b>>'1'", "x + 1 if isinstance(T, str) else x + 2"),
    "surrogates": (r"'\<<udc80||udc81>>'", r"x + (1 if T == '\udc80' else 2)"),
    "bytes": ("b'<<ab||ba>>'", "x + T[0]"),
    "complex": ("<<1j||2j>>", "x * abs(T)"),
    "none": ("<<None||0>>", "x + 1 if T is None else x + 2"),
    "ellipsis": ("<<...||None>>", "x + 1 if T is ... else x + 2"),
    "tuple": ("(<<1, 2||2, 1>>)", "x + T[0]"),
    "list": ("[<<1, 2||2, 1>>]", "x + T[0]"),
    "tuple and list": ("<<(1, 2)||[1, 2]>>", "x + (1 if type(T) is tuple else 2)"),
    "length of a list": ("[1<<||, 1>>]", "x + len(T)"),
    "bool of a list": ("[<<||0>>]", "x + 1 if T else x + 2"),
    "set": ("{1, <<2||3>>}", "x + 1 if 2 in T else x + 2"),
    "frozenset": ("frozenset({'a', '<<b||c>>'})", "x + 1 if 'b' in T else x + 2"),
    "set and frozenset": ("<<{1}||frozenset({1})>>", "x + (1 if type(T) is set else 2)"),
    "order of a dict": ("{'<<a': 1, 'b': 2||b': 2, 'a': 1>>}", "x + [*T.values()][0]"),
    "value of a dict": ("{'a': 1, 'b': <<2||3>>}", "x + T['b']"),
    "missing key": ("{'a': 1<<||, 'b': 2>>}", "x + T.get('b', 7)"),
    "key of a dict": ("{<<1||True>>: 1}", "x + (1 if [*T][0] is True else 2)"),
    "ordered dict": (
        "collections.OrderedDict(<<a=1, b=2||b=2, a=1>>)",
        "x + next(iter(T.values()))",
    ),
    "default of a dict": ("collections.defaultdict(<<int||lambda: 5>>)", "x + T['new']"),
    "function in a dict": ("{'act': torch.<<sin||cos>>}", "T['act'](x)"),
    "closure in a list": ("[made(<<2||3>>.0)]", "T[0](x)"),
    "lambda in a list": ("[lambda v: v * <<2||3>>]", "T[0](x)"),
    "deep": ("{'a': [({'b': <<2||3>>},)]}", "x * T['a'][0][0]['b']"),
    "range": ("range(<<2||3>>)", "x + len(T)"),
    "slice": ("slice(<<0, 4||4, 8>>)", "x + x[T].sum()"),
    "deque": ("collections.deque([<<1, 2||2, 1>>])", "x + T[0]"),
    "enum": ("enum.Enum('E', 'ONE TWO').<<ONE||TWO>>", "x + T.value"),
    "value of an enum": ("enum.Enum('E', {'ONE': <<1||2>>}).ONE", "x + T.value"),
    "int enum": ("enum.IntEnum('E', 'ONE TWO').<<ONE||TWO>>", "x * T"),
    "flag": ("enum.Flag('E', 'A B').<<A||B>>", "x + T.value"),
    "dataclass": ("dataclasses.make_dataclass('D', ['k'])(<<2||3>>)", "x * T.k"),
    "default of a dataclass": (
        "dataclasses.make_dataclass('D', [('k', int, <<2||3>>)])",
        "x * T().k",
    ),
    "fields of a dataclass": (
        "dataclasses.make_dataclass('D', ['<<k', 'j||j', 'k>>'])(2, 3)",
        "x * dataclasses.astuple(T)[0] + T.k",
    ),
    "named tuple": ("collections.namedtuple('N', '<<k j||j k>>')(2, 3)", "x * T.k"),
    "named tuple's value": ("collections.namedtuple('N', 'k')(<<2||3>>)", "x * T.k"),
    "namespace": ("types.SimpleNamespace(k=<<2||3>>)", "x * T.k"),
    "module of a library": ("<<math||np>>", "x * T.pi + (1 if T is math else 2)"),
    "dtype": ("torch.<<float32||float64>>", "x.to(T)"),
    "shape": ("torch.Size([<<4, 4||2, 8>>])", "x.reshape(T) + 1"),
    "device": ("torch.device('<<cpu||meta>>')", "x + (1 if T.type == 'cpu' else 2)"),
    "memory format": (
        "torch.<<contiguous_format||channels_last>>",
        "x + (1 if T == torch.contiguous_format else 2)",
    ),
    "tensor's value": ("torch.tensor([<<2||3>>.0])", "x * T"),
    "tensor's dtype": ("torch.ones(16)<<||.double()>>", "x + T"),
    "tensor's shape": ("torch.ones(<<16||1>>)", "x + T * T.numel()"),
    "tensor's gradient": ("torch.ones(16)<<||.requires_grad_()>>", "x + T"),
    "tensor's attribute": ("setattr(t := torch.ones(16), 'k', <<2||3>>) or t", "x * T.k"),
    "parameter and tensor": (
        "<<torch.ones(16||nn.Parameter(torch.ones(16), False>>)",
        "x + (1 if isinstance(T, nn.Parameter) else 2)",
    ),
    "numpy float": ("np.float32(<<2||3>>)", "x * T"),
    "numpy's type": ("np.<<float32||int64>>(2)", "x + (1 if isinstance(T, np.floating) else 2)"),
    "numpy array": ("np.array([<<2.0, 3||3.0, 2>>.0])", "x * T[0]"),
    "numpy dtype": ("np.dtype('<<float32||float64>>')", "x + (1 if T == np.float32 else 2)"),
    "numpy function": ("np.<<sin||cos>>", "x + torch.as_tensor(T(x.numpy()))"),
    "type": ("<<int||float>>", "x + 1 if isinstance(3, T) else x + 2"),
    "operator": ("operator.<<add||sub>>", "T(x, 1)"),
    "item getter": ("operator.itemgetter(<<0||1>>)", "x + T((1, 2))"),
    "method of a tensor": ("Tensor.<<sin||cos>>", "T(x)"),
    "overload": ("torch.ops.aten.<<sin||cos>>.default", "T(x)"),
    "weak reference": (
        "weakref.ref(keep.setdefault(<<2, Scaler(2||3, Scaler(3>>.0)))",
        "x * T().by",
    ),
    "wrapped function": ("functools.wraps(double)(<<double||made(3.0)>>)", "T(x)"),
    "cached function": ("functools.lru_cache(made(<<2||3>>.0))", "x + T(2)"),
    "generated function": ("compiled_text('def f(x): return x + <<1||2>>')", "T(x)"),
    "generated constants": ("compiled_text('def f(x): return x.<<sin||cos>>()')", "T(x)"),
    "types of an annotation": (
        "annotated(<<int||float>>)",
        "x + (1 if T.__annotations__['k'] is int else 2)",
    ),
    "doc": ("documented('<<one||two>>')", "x + (1 if T.__doc__ == 'one' else 2)"),
    "metaclass": ("type('Meta', (type,), {'k': <<2||3>>})('C', (), {})", "x * T.k"),
    "base class": ("type('C', (classed(<<2||3>>.0),), {})", "x * T.k"),
    "slots": ("slotted(<<2||3>>)", "x * T.k"),
    "truth": (
        "classed(1, type('L', (), {'__bool__': lambda s: <<True||False>>}))()",
        "x + 1 if T else x + 2",
    ),
    "length": ("classed(1, type('L', (), {'__len__': lambda s: <<2||3>>}))()", "x + len(T)"),
    "item": ("classed(1, type('L', (), {'__getitem__': lambda s, i: <<2||3>>}))()", "x + T[0]"),
    "getattr": (
        "classed(1, type('L', (), {'__getattr__': lambda s, n: <<2||3>>}))()",
        "x + T.absent",
    ),
    "equality": (
        "classed(1, type('L', (), {'__eq__': lambda s, o: <<True||False>>}))()",
        "x + 1 if T == 5 else x + 2",
    ),
    "property": ("classed(1, type('L', (), {'p': property(lambda s: <<2||3>>)}))()", "x + T.p"),
    "iterator": (
        "classed(1, type('L', (), {'__iter__': lambda s: iter((<<2||3>>,))}))()",
        "x + [*T][0]",
    ),
    "subclass of dict": ("classed(1, dict)(a=<<2||3>>)", "x + T['a']"),
    "subclass of list": ("classed(1, list)([<<2||3>>])", "x + T[0]"),
    "subclass of float": ("classed(1, float)(<<2||3>>.0)", "x * float(T)"),
    "subclass of str": ("classed(1, str)('<<a||b>>')", "x + (1 if T == 'a' else 2)"),
    "fraction": ("__import__('fractions').Fraction(1, <<2||3>>)", "x * T.denominator"),
    "path": ("__import__('pathlib').Path('<<a||ab>>')", "x + len(T.name)"),
    "pattern": ("__import__('re').compile('<<a||b>>')", "x + len(T.pattern) + (T.pattern == 'a')"),
    "counter object": ("itertools.count(<<2||3>>)", "x + next(T)"),
    "generator": ("(i for i in [<<2||3>>])", "x + next(T, 9)"),
    "list iterator": ("iter([<<2, 4||3, 5>>])", "x + next(T)"),
    "mapping proxy": ("types.MappingProxyType({'a': <<2||3>>})", "x + T['a']"),
    "context": ("torch.<<no_grad||enable_grad>>()", "within(T, x)"),
}

_HELPERS = """\
keep = {}
def annotated(kind):
    def inner(k): pass
    inner.__annotations__ = {"k": kind}
    return inner
def documented(doc):
    def inner(): pass
    inner.__doc__ = doc
    return inner
def slotted(k):
    class Slotted:
        __slots__ = ("k",)
    made = Slotted()
    made.k = k
    return made
def within(context, x):
    with context: return x * 2, torch.tensor(torch.is_grad_enabled())
first, second = lambda: ONE, lambda: OTHER
"""

# Where the value is: `put` puts it there, and the argument of USE is how `f` reads it.
_PLACES = {
    "global": "def put(t):\n    global thing; thing = t\ndef f(x): return USE(thing)",
    "closure": """\
def outer(t):
    def f(x): return USE(t)
    def put(value):
        nonlocal t; t = value
    return f, put
f, put = outer(None)""",
    "default of f": "def f(x, t=None): return USE(t)\ndef put(t): f.__defaults__ = (t,)",
    "keyword default of f": "def f(x, *, t=None): return USE(t)\ndef put(t): f.__kwdefaults__ = {'t': t}",
    "module's attribute": """\
class M(nn.Module):
    def forward(self, x): return USE(self.thing)
f = M()
def put(t): f.__dict__.pop("thing", None); f._modules.pop("thing", None); f._parameters.pop("thing", None); f.thing = t""",
    "class attribute": """\
class M(nn.Module):
    def forward(self, x): return USE(type(self).thing)
f = M()
def put(t): M.thing = t""",
    "object's attribute": "holder = Scaler(1)\ndef put(t): holder.thing = t\ndef f(x): return USE(holder.thing)",
    "dict": "table = {'a': 0, 'thing': None}\ndef put(t): table['thing'] = t\ndef f(x): return USE(table['thing'])",
    "list": "things = [0, None]\ndef put(t): things[1] = t\ndef f(x): return USE(things[1])",
    "self of a method": """\
class Holder:
    def method(self, x): return USE(self.thing)
holder = Holder()
f = holder.method
def put(t): holder.thing = t""",
    "submodule": """\
class Block(nn.Module):
    def forward(self, x): return USE(self.held["thing"])
f = nn.Sequential(nn.Identity(), Block())
def put(t): f[1].held = {"thing": t}""",
    "library": """\
lib = library("lib", "thing = None")
def put(t): lib.thing = t
def f(x): return USE(lib.thing)""",
    "inlined function's global": """\
def put(t):
    global thing; thing = t
def inner(x): return USE(thing)
def f(x): return inner(x)""",
    "inlined function's default": "def inner(x, t=None): return USE(t)\ndef put(t): inner.__defaults__ = (t,)\ndef f(x): return inner(x)",
    "function's attribute": "def f(x): return USE(f.thing)\ndef put(t): f.thing = t",
    "argument": "def put(t):\n    global thing; thing = t\ndef f(x, t): return USE(t)\ndef run(g): return g(x, thing)",
    "argument in a dict": "def put(t):\n    global thing; thing = t\ndef f(x, **kw): return USE(kw['t'])\ndef run(g): return g(x, t=thing)",
    "after a break": """\
def put(t):
    global thing; thing = t
def f(x):
    x = x + 1
    torch._dynamo.graph_break()
    return USE(thing)""",
    "free variable of a loop's body": """\
def put(t):
    global fs; fs = [(lambda t: lambda x: USE(t))(t) for t in (t, t)]
def f(x): return [g(x) for g in fs]""",
}
_EACH = 3  # places for a value of each kind


def _generated() -> list[Program]:
    places = [*_PLACES]
    found = []
    for number, kind in enumerate(_KINDS):
        for turn in range(_EACH):
            place = places[(number * _EACH + turn + number // len(places)) % len(places)]
            found.append(_put(kind, place))
    return found


def _put(kind: str, place: str) -> Program:
    values, use = _KINDS[kind]
    one, other = (re.sub(r"<<(.*?)\|\|(.*?)>>", choice, values) for choice in (r"\1", r"\2"))
    body = re.sub(
        r"USE\(((?:[^()]|\([^()]*\))*)\)",
        lambda match: re.sub(r"\bT\b", lambda _: match[1], f"({use})"),
        _PLACES[place],
    )
    helpers = _HELPERS.replace("ONE", one).replace("OTHER", other)
    end = "put(first())\ndef change(): put(second())\n"
    return Program(f"{place}", f"{place}: {kind}", f"{helpers}{body}\n{end}")
