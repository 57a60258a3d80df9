"""Replacements in torch by a program: kind of slot × slot × way × time of the replacement.

No graph names a replacement when its key is made. A second program on the cache of a first one must
never get code that was compiled while torch was different.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch._inductor.decomposition
import torch._inductor.lowering
import torch._prims_common
import torch._refs
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch._C import DispatchKey
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.pattern_matcher import (
    Arg,
    CallFunction,
    fwd_only,
    register_graph_pattern,
    register_lowering_pattern,
    register_replacement,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tests.equal.programs import Call, Pair, calling
from tests.support.switches import attribute

Context = contextlib.AbstractContextManager[Any]
_aten, _prims = torch.ops.aten, torch.ops.prims
_lowerings = torch._inductor.lowering.lowerings
_decompositions = torch._inductor.decomposition.decompositions


@dataclass(frozen=True)
class Slot:
    """A replaceable part of torch, and a program that uses it.

    Attributes:
        program: the function to compile, or its name in torch.
        hows: the names of ways to replace the part.
        put: replaces the part; takes ``of``, one of these ways, and a number for the replacement.
        traced: whether only tracing changes, so that equal replacements hit at the second level.
        native: whether C++ is compiled.
    """

    kind: str
    name: str
    program: Callable[[Tensor], Any] | str
    hows: tuple[str, ...]
    put: Callable[..., Context]
    of: tuple[Any, ...] = ()
    traced: bool = True
    native: bool = False


def _operator(name: str) -> Any:
    return getattr(_aten, name).default


# -- names in namespaces and classes: a program that uses each, and another function of torch

_NAMES: list[tuple[str, str, Callable[[Tensor], Any], Any]] = [
    ("torch", "layer_norm", lambda x: F.layer_norm(x, (8,)), torch.sum),
    ("torch", "relu", F.relu, torch.sigmoid),
    ("torch._C._nn", "silu", F.silu, torch.sigmoid),
    ("torch._VF", "einsum", lambda x: torch.einsum("ij,kj->ik", x, x), torch.sigmoid),
    ("torch:Tensor", "__matmul__", lambda x: x @ x.t(), torch.Tensor.sub),
    ("torch:Tensor", "__getitem__", lambda x: x[1:], torch.Tensor.sub),
    ("torch.nn.functional", "relu", lambda x: torch.nn.ReLU()(x), F.silu),
    ("torch.nn.functional", "linear", lambda x: F.linear(x, x), torch.mul),
    ("torch.linalg", "vector_norm", lambda x: torch.linalg.vector_norm(x), torch.sum),
    ("torch.fft", "fftshift", lambda x: torch.fft.fftshift(x), torch.sin),
    ("torch._refs", "sinc", lambda x: torch.sinc(x), torch._refs.deg2rad),
    ("torch._prims", "sin", lambda x: torch.sinc(x), torch.cos),
    ("torch._decomp.decompositions", "mse_loss", lambda x: F.mse_loss(x, x * 2), torch.mul),
    ("torch._meta_registrations", "meta_mm", lambda x: x @ x.t(), torch.mul),
]


def _scaled(original: Callable[..., Any], by: float, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) * by


class _Callable:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _plainly(changed: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: changed(*args, **kwargs)


# Ways of writing a function that does what a partial object does, in place of another function.
_DRESSES: dict[str, Callable[[Any, functools.partial[Any]], Any]] = {
    "plainly": lambda _, changed: _plainly(changed),
    "wrapping": lambda original, changed: functools.wraps(original)(_plainly(changed)),
    "allowed": lambda original, changed: torch.compiler.allow_in_graph(
        functools.wraps(original)(_plainly(changed))
    ),
    "partial": lambda _, changed: changed,
    "object": lambda _, changed: _Callable(changed),
    "without grad": lambda _, changed: torch.no_grad()(_plainly(changed)),
    "torch's": lambda _, changed: torch.no_grad()(_plainly(changed)),
    "lru": lambda _, changed: functools.lru_cache(maxsize=None)(_plainly(changed)),
}
_OF_NAMES = ("plainly", "wrapping", "allowed", "partial", "object", "without grad")


def _owner(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(sys.modules[module], name) if name else sys.modules[module]


def _named(place: str, name: str, other: Any, how: str, by: float) -> Context:
    owner = _owner(place)
    original = getattr(owner, name)
    changed = functools.partial(_scaled, original, by)
    new = other if how == "torch's other" else _DRESSES[how](original, changed)
    if isinstance(owner, type) and not isinstance(new, types.FunctionType):
        new = functools.wraps(new)(_plainly(functools.partial(new)))
    return patch.object(owner, name, new)


def _names() -> Iterator[Slot]:
    turns = itertools.cycle(itertools.permutations(_OF_NAMES, 3))
    for place, name, program, other in _NAMES:
        hows = (*next(turns), "torch's other")
        yield Slot("names", f"{place}.{name}", program, hows, _named, (place, name, other))


# -- tables: decompositions, lowerings, and kernels of operators by dispatch key


def _lowered(operator: Any, how: str, by: float) -> Context:
    old, multiply = _lowerings[operator], _lowerings[_aten.mul.Tensor]
    if how == "torch's other":
        return patch.dict(_lowerings, {operator: _lowerings[_aten.cos.default]})
    return patch.dict(_lowerings, {operator: lambda x: multiply(old(x), by)})


def _decomposed(operator: Any, how: str, by: float) -> Context:
    other = _decompositions[_aten.mish.default]
    changed = functools.partial(_scaled, torch.tanh, by)
    new = other if how == "torch's other" else _DRESSES[how](other, changed)
    return patch.dict(_decompositions, {operator: new})


@contextlib.contextmanager
def _by_key(operator: Any, key: Any, how: str, by: float) -> Iterator[None]:
    function: Any = lambda x, *_: torch.sin(x) * by  # noqa: E731 - one of several
    if how.startswith("torch's"):
        function = _decompositions[(_aten.silu if by == 2 else _aten.mish).default]
    with patch.dict(operator.py_kernels):
        operator.py_kernels.pop(key, None)
        if how.endswith("given"):
            operator.py_impl(key)(function)
        else:
            operator.py_kernels[key] = function
        operator._dispatch_cache.clear()
        try:
            yield
        finally:
            operator._dispatch_cache.clear()


def _called(name: str, x: Tensor) -> Any:
    return (getattr(F, name, None) or getattr(torch, name))(x) + 1


def _tables() -> Iterator[Slot]:
    hows: tuple[str, ...] = ("plainly", "torch's other")
    for name in ("sin", "exp"):
        of: tuple[Any, ...] = (_operator(name),)
        yield Slot("tables", f"lowering of {name}", name, hows, _lowered, of, traced=False)
    hows = ("plainly", "wrapping", "partial", "torch's other")
    for name in ("silu", "hardswish"):
        of = (_operator(name),)
        yield Slot("tables", f"decomposition of {name}", name, hows, _decomposed, of)
    hows = ("given", "written", "torch's given", "torch's written")
    keys = itertools.cycle(("CompositeImplicitAutograd", "AutogradCPU", "Meta", "CPU"))
    for name, key in zip(("silu", "mish", "hardswish", "sigmoid"), keys, strict=False):
        of = _operator(name), getattr(DispatchKey, key)
        yield Slot("tables", f"{key} of {name}", name, hows, _by_key, of)


# -- members of modules that generate code: each replacement changes operators of the graph

_INSTEAD = {2.0: _aten.cos.default, 3.0: _aten.tanh.default}
_FX = "torch._inductor.fx_passes"
_GIVEN_A_GRAPH = {
    "torch._inductor.compile_fx": "_recursive_joint_graph_passes post_grad_passes view_to_reshape",
    f"{_FX}.joint_graph": "constant_fold_uniform_value",
    f"{_FX}.post_grad": "remove_noop_ops reorder_for_locality",
    f"{_FX}.reinplace": "canonicalize_view_scatter_ops",
}
_GIVEN_AN_OPERATOR = {
    "torch._inductor.graph:GraphLowering": "call_function",
    "torch.fx.experimental.proxy_tensor": "proxy_call",
    "torch._subclasses.functional_tensor:FunctionalTensorMode": "__torch_dispatch__",
}


def _in_graph(original: Any, by: float, first: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(first, *args, **kwargs)
    graph = getattr(first, "graph", first)
    for node in graph.nodes:
        if node.target is _aten.sin.default:
            node.target = _INSTEAD[by]
    if graph is not first:
        first.recompile()
    return result


def _in_call(original: Any, by: float, first: Any, operator: Any, *args: Any, **kw: Any) -> Any:
    operator = _INSTEAD[by] if operator is _aten.sin.default else operator
    return original(first, operator, *args, **kw)


def _in_text(original: Any, by: float, x: Any) -> Any:
    text = original(x)
    return type(text)(f"({text} + {text})") if by > 2 else text


def _member(place: str, name: str, change: Any, how: str, by: float) -> Context:
    owner = _owner(place)
    present: Any = inspect.getattr_static(owner, name)
    original = present.__func__ if isinstance(present, staticmethod) else present
    new = _DRESSES[how](original, functools.partial(change, original, by))
    return patch.object(owner, name, staticmethod(new) if original is not present else new)


def _members() -> Iterator[Slot]:
    def program(x: Tensor) -> Any:
        return x.sin() + x.exp()

    of_graphs = ("plainly", "wrapping", "torch's", "lru", "partial")
    for given, change, hows in (
        (_GIVEN_A_GRAPH, _in_graph, of_graphs),
        (_GIVEN_AN_OPERATOR, _in_call, of_graphs[:3]),
    ):
        for place, names in given.items():
            for name in names.split():
                of: tuple[Any, ...] = place, name, change
                yield Slot("members", f"{place}.{name}", program, hows, _member, of, traced=False)
    for name in ("sin", "exp", "sqrt"):
        of = "torch._inductor.codegen.cpp:CppVecOverrides", name, _in_text
        calls = functools.partial(lambda name, x: getattr(x.abs(), name)() + 1, name)
        yield Slot("members", f"C++ of {name}", calls, of_graphs[:2], _member, of, False, True)


# -- parts of functions, which have no name in a module

_FUNCTIONS = ("relu", "silu", "mish", "elu", "celu", "leaky_relu", "hardsigmoid")
# Code for a function must have as many closure variables as the function's own code.
_TEXT = """
def make({free}):
    def code(*args, **kwargs):
        lambda: ({free})
        import torch
        return torch.sin([*args, *kwargs.values()][0]) * {by}
    return code
"""


def _coded(function: Any, how: str, by: float) -> Context:
    names: dict[str, Any] = {}
    old = function.__code__
    if how == "another's code":
        code = (F.silu if by == 2 or old is F.mish.__code__ else F.mish).__code__
        code = F.softsign.__code__ if code is old else code
    else:
        exec(_TEXT.format(free=", ".join(old.co_freevars), by=by), names)
        code = names["make"](*old.co_freevars).__code__
        if how == "code under torch's file":
            code = code.replace(co_filename=old.co_filename, co_name=old.co_name)
    return attribute(function, "__code__", code)


def _defaulted(function: Any, how: str, by: float) -> Context:
    old = function.__defaults__
    last = max(number for number, each in enumerate(old) if isinstance(each, float))
    return attribute(function, "__defaults__", (*old[:last], by / 10, *old[last + 1 :]))


def _cell_of(function: Any) -> Any:
    """Return the closure variable with the wrapped function, if this is a wrapper of torch."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    named = zip(names, getattr(function, "__closure__", None) or (), strict=True)
    return next((cell for name, cell in named if name in ("f", "fn", "func")), None)


def _enclosed(function: Any, how: str, by: float) -> Context:
    cell = _cell_of(function)
    changed = functools.partial(_scaled, cell.cell_contents, by)
    return attribute(cell, "cell_contents", _plainly(changed))


def _insides() -> Iterator[Slot]:
    codes = ("code", "code under torch's file", "another's code")
    for name in _FUNCTIONS:
        of = (getattr(F, name),)
        yield Slot("insides", f"F.{name}", name, codes, _coded, of)
        if name in ("elu", "celu", "leaky_relu"):
            yield Slot("insides", f"F.{name}", name, ("defaults",), _defaulted, of)
        formula = _decompositions.get(_operator(name))
        if _cell_of(formula) is not None:  # code generation also calls the wrapper
            yield Slot("insides", f"aten.{name}", name, ("cell",), _enclosed, (formula,), False)


# -- operators: replaced by others, and their kernels

_OPERATORS = ("sin", "cos", "exp", "tanh", "erf", "sigmoid")


def _reaching(name: str) -> Any:
    """Return an operator with a backward formula that calls ATen's operator of this name."""
    made = torch.library.custom_op(f"s3cache_placed::{name}", lambda x: x * 2, mutates_args=(),
                                   schema="(Tensor x) -> Tensor")  # fmt: skip
    made.register_fake(torch.empty_like)
    made.register_autograd(lambda _, grad: getattr(torch.ops.aten, name).default(grad))
    return lambda x: made(x) * x


class _Unchanged(TorchDispatchMode):
    """Calls each operator as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _placed(name: str, how: str, by: float) -> Context:
    # At its first dispatch to Python torch keeps a pointer to an overload, without a reference. If
    # that were a replacement, it would be freed after this change, and later programs would crash.
    with _Unchanged():
        getattr(_aten, name)(torch.ones(1))

    def scaled(x: Tensor) -> Tensor:
        return torch.sinc(x) * by

    packet, other = getattr(_aten, name), _aten.hardswish if by == 2 else _aten.mish
    if how.startswith("overload"):
        return patch.object(packet, "default", other.default if "another" in how else scaled)
    own = type("Packet", (), {"default": staticmethod(scaled)})
    return patch.object(_aten, name, other if "another" in how else own)


@contextlib.contextmanager
def _kernel(namespace: str, name: str, key: str, how: str, by: float) -> Iterator[None]:
    function: Any = lambda x, *_: torch.sinc(x) * by  # noqa: E731 - one of two
    if how == "torch's":
        function = torch._refs.sinc if by == 2 else torch._refs.deg2rad
    library = torch.library.Library(namespace, "IMPL")
    try:
        library.impl(name, function, key)
        yield
    finally:
        library._destroy()


def _operators() -> Iterator[Slot]:
    hows: tuple[str, ...] = ("overload by another", "overload by a function")
    hows += ("packet by another", "packet by a class")
    for name in _OPERATORS:
        yield Slot("operators", name, _reaching(name), hows, _placed, (name,))
    keys = itertools.cycle(("AutogradCPU", "CompositeImplicitAutograd", "CPU", "Meta", "Autograd"))
    for name, key in zip(_OPERATORS[:5], keys, strict=False):
        program = functools.partial(lambda name, x: getattr(_prims, name)(x.abs()) + 1, name)
        title, of = f"prims.{name} for {key}", ("prims", name, key)
        yield Slot("operators", title, program, ("own", "torch's"), _kernel, of, traced=False)
    for name in ("silu", "mish", "sinc", "celu"):
        for key in ("AutogradCPU", "CompositeImplicitAutograd", "CPU"):
            title, of = f"aten.{name} for {key}", ("aten", name, key)
            yield Slot("operators", title, name, ("own",), _kernel, of, traced=False)


# -- constants: a table maps each input type to the type in which decompositions compute

_TABLE = "_computation_dtype_map"


def _constant(how: str, by: float) -> Context:
    table: Any = getattr(torch._prims_common, _TABLE)
    kind = torch.float16 if by == 2 else torch.bfloat16
    if how == "another table":
        return patch.object(torch._prims_common, _TABLE, {**table, torch.bfloat16: kind})
    if how == "only item":
        return patch.dict(table, {torch.bfloat16: kind}, clear=True)
    return patch.dict(table, {torch.bfloat16: kind})


def _constants() -> Iterator[Slot]:
    hows = ("an item", "only item", "another table")
    for name in ("silu", "mish", "elu", "leaky_relu", "hardsigmoid", "logsigmoid"):
        program = functools.partial(
            lambda name, x: getattr(F, name)(x.bfloat16()).float() + x, name
        )
        yield Slot("constants", name, program, hows, _constant, traced=False)


# -- registries of Inductor

_PASSES = {
    "early": joint_graph.early_patterns,
    **{f"joint {number}": each for number, each in enumerate(joint_graph.pass_patterns[:2])},
    **{f"post {number}": each for number, each in enumerate(post_grad.pass_patterns[:3])},
}


@contextlib.contextmanager
def _pattern(where: Any, name: str, how: str, by: float) -> Iterator[None]:
    operator = _operator(name)
    tables = where.patterns, where.seen_patterns
    before = [{key: [*entries] for key, entries in table.items()} for table in tables]
    pattern, prepend = CallFunction(operator, Arg()), how.endswith("first")
    if how.startswith("graph"):
        register_graph_pattern(pattern, pass_dict=where, prepend=prepend)(
            lambda match, x: match.replace_by_example(lambda x: x * by, [x])
        )
    elif how.startswith("lowering"):
        register_lowering_pattern(pattern, pass_dict=where, prepend=prepend)(
            lambda match, x: _lowerings[_aten.mul.Tensor](x, by)
        )
    else:
        register_replacement(
            lambda x: operator(x), lambda x: x * by, [torch.ones(4, 8)], fwd_only, where
        )
    try:
        yield
    finally:
        for table, previous in zip(tables, before, strict=True):
            table.clear()
            table.update(previous)


@contextlib.contextmanager
def _wrapper(how: str, by: float) -> Iterator[None]:
    class Wrapper(PythonWrapperCodegen):
        def generate_return(self, output_refs: list[str]) -> None:
            changed = [f"{ref}.mul({by})" if "buf" in ref else ref for ref in output_refs]
            super().generate_return(changed)

    wrapper: Any = Wrapper
    if how == "constructor":
        made = staticmethod(lambda *args: Wrapper.create(*args))
        wrapper = type("Other", (PythonWrapperCodegen,), {"create": made})
    common.init_backend_registration()
    with patch.dict(common.device_codegens):
        common.register_backend_for_device("cpu", CppScheduling, wrapper, CppWrapperCpu)
        yield


def _registries() -> Iterator[Slot]:
    names = itertools.cycle(_OPERATORS)
    for where, passes in _PASSES.items():
        hows: tuple[str, ...] = ("graph", "graph first", "replacement")
        if where.startswith("post"):
            hows += ("lowering", "lowering first")
        for name in (next(names), next(names)):
            of = passes, name
            yield Slot("registries", f"{name} in {where}", name, hows, _pattern, of, traced=False)
    yield Slot("registries", "wrapper", "sin", ("method", "constructor"), _wrapper, traced=False)


# -- pairs of programs

_SINCE = ("after enable", "before enable", "after another", "before enable, after another")


def _input() -> tuple[Tensor]:
    return (torch.linspace(-2, 2, 32).reshape(4, 8).requires_grad_(),)


def _pair(slot: Slot, how: str, since: str) -> Pair:
    plain = contextlib.nullcontext
    other, second = (functools.partial(slot.put, *slot.of, how, by) for by in (2.0, 3.0))
    first, early = other if "another" in since else plain, "before" in since
    program = slot.program
    if isinstance(program, str):
        program = functools.partial(_called, program)
    return calling(
        slot.kind,
        f"{slot.name} {how}, {since}",
        program,
        (Call(_input, forward=first, backward=plain),),
        (Call(_input, forward=plain if early else second, backward=plain),),
        around=second if early else plain,
        as_cold=True,
        native=slot.native,
    )


def replacements() -> Iterator[Pair]:
    """Yield each slot in each way, at two times; some equal replacements must hit."""
    slots = (_names, _tables, _members, _insides, _operators, _constants, _registries)
    for number, slot in enumerate(itertools.chain.from_iterable(each() for each in slots)):
        for turn, how in enumerate(slot.hows):
            for since in (_SINCE[(number + turn) % 4], _SINCE[(number + turn + 1) % 4]):
                if "torch's" in how and "another" in since and slot.kind in ("names", "tables"):
                    continue  # both programs have the same function
                yield _pair(slot, how, since)
        if slot.traced and number % 4 == 0 and "torch's" not in slot.hows[0]:
            pair = _pair(slot, slot.hows[0], "after another")
            name = f"{slot.name} {slot.hows[0]}, as before"
            yield replace(pair, name=name, second=pair.first, must_hit=True)
