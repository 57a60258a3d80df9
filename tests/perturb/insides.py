"""What is inside of torch's functions and operators, and which of its functions stands where.

Nothing of it is in a namespace: code, defaults and closures of functions; tables of ``py_impl``;
kernels of torch's operators that are not ATen's; torch's functions and operators in each other's
place; what is registered with Inductor; what stands in the modules that make code, and what is in
their tables; what Inductor is given to compile by. Each pair is made of words of a grammar: what is
altered, how, and since when.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.decomposition
import torch._refs
import torch.nn.functional as F  # noqa: N812 - as everybody does
from torch import Tensor
from torch._C import DispatchKey

from tests.perturb.backing import backend, backends
from tests.perturb.constants import constants
from tests.perturb.displaced import displaced
from tests.perturb.histories import Call, History
from tests.perturb.members import members, native_members
from tests.perturb.registries import registered

__all__ = ["insides"]

Context = Callable[[], contextlib.AbstractContextManager[Any]]
Altering = Callable[[float], Context]

_aten, _prims = torch.ops.aten, torch.ops.prims
_decompositions = torch._inductor.decomposition.decompositions
_SINCE = ("after enable", "before enable", "after another")


def insides() -> Iterator[History]:
    """All families, each member at one time."""
    for family in (
        _functions,
        _tables,
        _kernels,
        _swaps,
        registered,
        backends,
        displaced,
        constants,
    ):
        sinces = itertools.cycle(_SINCE)
        for name, program, make in family():
            since = next(sinces)
            pair = _pair(family.__name__.strip("_"), f"{name}, {since}", program, make, since)
            yield replace(pair, **_OPTIONS.get(pair.family, {}))
    for since, (name, program, make) in zip(itertools.cycle(_SINCE), members(), strict=False):
        yield _pair("members", f"{name}, {since}", program, make, since)
    for since, (name, program, make) in zip(
        itertools.cycle(_SINCE), native_members(), strict=False
    ):
        yield replace(_pair("members", f"{name}, {since}", program, make, since), native=True)
    for name, program, make in itertools.islice(members(), 0, None, 9):
        yield _as_before("members", name, program, make)
    for name, program, make in itertools.islice(_functions(), 0, None, 9):
        yield _as_before("functions", name, program, make)
    for name, program, make in itertools.islice(registered(), 0, None, 7):
        yield _as_before("registered", name, program, make)
    for name, program, make in itertools.islice(_tables(), 0, None, 5):
        if "torch's" not in name:
            yield _as_before("tables", name, program, make)
    for name, program, make in itertools.islice(displaced(), 0, None, 7):
        yield _as_before("displaced", name, program, make)
    for name, program, make in itertools.islice(constants(), 0, None, 7):
        yield _as_before("constants", name, program, make)


_OPTIONS: dict[str, dict[str, Any]] = {"backends": {"options": {"backend": backend}}}


def _input() -> tuple[Tensor]:
    return (torch.linspace(-2, 2, 32).reshape(4, 8).requires_grad_(),)


def _pair(family: str, name: str, program: Any, make: Altering, since: str) -> History:
    plain = contextlib.nullcontext
    first = make(2.0) if since == "after another" else plain
    early = since == "before enable"
    return History(
        family,
        name,
        program,
        (Call(_input, forward=first, backward=plain),),
        (Call(_input, forward=plain if early else make(3.0), backward=plain),),
        around=make(3.0) if early else plain,
        as_cold=True,
        native=False,
    )


def _as_before(family: str, name: str, program: Any, make: Altering) -> History:
    """What is altered alike hits."""
    pair = _pair(family, f"{name}, as before", program, make, "after another")
    return replace(pair, second=pair.first, must_hit=True)


_Member = tuple[str, Callable[[Tensor], Any], Altering]


# -- functions

_SIMPLE = [
    "relu",
    "silu",
    "mish",
    "hardswish",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "relu6",
    "hardtanh",
    "hardsigmoid",
    "softsign",
    "tanhshrink",
]
_FORMULAS = [
    "silu",
    "hardswish",
    "mish",
    "elu",
    "hardsigmoid",
    "softplus",
    "leaky_relu",
    "hardtanh",
]
_REFS = ["sinc", "deg2rad", "logaddexp", "rot90", "trace"]


def _simple(name: str, x: Tensor) -> Any:
    return getattr(F, name)(x) + 1


def _ref(name: str, x: Tensor) -> Any:
    return (getattr(torch, name)(x, x) if name == "logaddexp" else getattr(torch, name)(x)) + 1


def _functions() -> Iterator[_Member]:
    for name, how in itertools.product(
        _SIMPLE, ("code", "code under torch's file", "other's code")
    ):
        function = getattr(F, name)
        program = functools.partial(_simple, name)
        yield f"F.{name} {how}", program, _altering(_coded, function, how)
    for name in ("elu", "celu", "leaky_relu", "hardtanh", "layer_norm", "normalize"):
        called = _DEFAULTED.get(name, functools.partial(_simple, name))
        yield f"F.{name} defaults", called, _altering(_defaulted, getattr(F, name))
    for name in _FORMULAS:
        formula = _decompositions[getattr(_aten, name).default]
        program = functools.partial(_simple, name)
        yield f"a cell of aten.{name}", program, _altering(_recelled, formula)
        yield f"code in aten.{name}", program, _altering(_coded, _innermost(formula), "code")
    for name in _REFS:
        program = functools.partial(_ref, name)
        inner = _innermost(getattr(torch._refs, name))
        yield f"code in _refs.{name}", program, _altering(_coded, inner, "code")


_DEFAULTED: dict[str, Callable[[Tensor], Any]] = {
    "layer_norm": lambda x: F.layer_norm(x, (8,)) + 1,
}


def _altering(context: Callable[..., Any], *args: Any) -> Altering:
    return lambda by: functools.partial(context, *args, by)


@contextlib.contextmanager
def _coded(function: types.FunctionType, how: str, by: float) -> Iterator[None]:
    names: dict[str, Any] = {}
    old = function.__code__
    if how == "other's code":
        code = (F.silu if by == 2 or old is F.mish.__code__ else F.mish).__code__
        code = F.softsign.__code__ if code is old else code
    else:
        exec(_TEXT.format(free=", ".join(old.co_freevars), by=by), names)
        code = names["make"](*old.co_freevars).__code__
        if how == "code under torch's file":
            code = code.replace(co_filename=old.co_filename, co_name=old.co_name)
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = old


# Code that is put into a function has to have as many variables of its closure as that one.
_TEXT = """
def make({free}):
    def code(*args, **kwargs):
        lambda: ({free})
        import torch
        return torch.sin([*args, *kwargs.values()][0]) * {by}
    return code
"""


@contextlib.contextmanager
def _defaulted(function: types.FunctionType, by: float) -> Iterator[None]:
    old = function.__defaults__
    assert old is not None
    floats = [number for number, each in enumerate(old) if isinstance(each, float)]
    function.__defaults__ = tuple(
        by / 10 if number == floats[-1] else each for number, each in enumerate(old)
    )
    try:
        yield
    finally:
        function.__defaults__ = old


def _innermost(function: Any) -> Any:
    """What a chain of wrappers of torch's is made around."""
    for cell in _cells_of(function):
        return _innermost(cell.cell_contents)
    return function


def _cells_of(function: Any) -> list[types.CellType]:
    """The cells in which a wrapper of torch's has what it wraps."""
    named = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [cell for name, cell in named if name in ("f", "fn", "func")]


@contextlib.contextmanager
def _recelled(function: types.FunctionType, by: float) -> Iterator[None]:
    cell = _cells_of(function)[0]
    old = cell.cell_contents

    def scaled(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs) * by

    cell.cell_contents = scaled
    try:
        yield
    finally:
        cell.cell_contents = old


# -- tables of operators

_OPERATORS = [
    "silu",
    "mish",
    "hardswish",
    "sigmoid",
    "tanh",
    "relu",
    "exp",
    "sin",
    "hardsigmoid",
    "elu",
]
_KEYS = ("CompositeImplicitAutograd", "AutogradCPU", "Meta", "CPU")


def _called(name: str, x: Tensor) -> Any:
    return (getattr(F, name, None) or getattr(torch, name))(x) + 1


def _tables() -> Iterator[_Member]:
    hows = itertools.cycle(("given", "written", "torch's given", "torch's written"))
    for name, key in itertools.product(_OPERATORS, _KEYS):
        for how in (next(hows), next(hows)):
            operator = getattr(_aten, name).default
            program = functools.partial(_called, name)
            yield f"{key} of {name} {how}", program, _altering(_entered, operator, key, how)
        next(hows)


@contextlib.contextmanager
def _entered(operator: Any, key_name: str, how: str, by: float) -> Iterator[None]:
    def scaled(x: Tensor, *args: Any) -> Tensor:
        return torch.sin(x) * by

    function: Any = scaled
    if how.startswith("torch's"):
        function = _decompositions[(_aten.silu if by == 2 else _aten.mish).default]
    key = getattr(DispatchKey, key_name)
    before = dict(operator.py_kernels)
    operator.py_kernels.pop(key, None)
    if how.endswith("given"):
        operator.py_impl(key)(function)
    else:
        operator.py_kernels[key] = function
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.clear()
        operator.py_kernels.update(before)
        operator._dispatch_cache.clear()


# -- kernels of torch's operators that are not ATen's

_PRIMS = ["sin", "cos", "exp", "tanh", "erf", "sqrt", "neg", "reciprocal", "abs", "floor"]
_DISPATCHED = ("AutogradCPU", "CompositeImplicitAutograd", "CPU", "Meta", "Autograd")


def _prim(name: str, x: Tensor) -> Any:
    return getattr(_prims, name)(x.abs()) + 1


def _kernels() -> Iterator[_Member]:
    hows = itertools.cycle(("of the user's", "of torch's"))
    for name, key in itertools.product(_PRIMS, _DISPATCHED):
        program = functools.partial(_prim, name)
        how = next(hows)
        yield f"prims.{name} for {key} {how}", program, _altering(_registered, name, key, how)


@contextlib.contextmanager
def _registered(name: str, key: str, how: str, by: float) -> Iterator[None]:
    def scaled(x: Tensor) -> Tensor:
        return torch.sinc(x) * by

    function: Any = scaled
    if how == "of torch's":
        function = torch._refs.sinc if by == 2 else torch._refs.deg2rad
    library = torch.library.Library("prims", "IMPL")
    try:
        library.impl(name, function, key)
        yield
    finally:
        library._destroy()


# -- torch's functions in each other's place

_SWAPPED = {
    "torch.nn.functional": "relu silu mish hardswish selu softsign tanhshrink",
    "torch": "sin cos tanh exp relu",
    "torch:Tensor": "sin cos tanh exp sigmoid",
    "torch._refs": "sinc deg2rad rad2deg",
}


def _swaps() -> Iterator[_Member]:
    for place, names in _SWAPPED.items():
        for name, *others in itertools.permutations(names.split(), 3):
            if hash((len(name), *map(len, others))) % 5 == 0 or place == "torch._refs":
                program = functools.partial(_found, place, name)
                yield (
                    f"{place}.{name} is {others}",
                    program,
                    _altering(_swapped, place, name, others),
                )


def _owner(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(sys.modules[module], name) if name else sys.modules[module]


def _found(place: str, name: str, x: Tensor) -> Any:
    owner = torch if place == "torch._refs" else _owner(place)
    return getattr(owner, name)(x) + 1


@contextlib.contextmanager
def _swapped(place: str, name: str, others: list[str], by: float) -> Iterator[None]:
    owner = _owner(place)
    had, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, getattr(owner, others[0 if by == 2 else 1]))
    try:
        yield
    finally:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)
