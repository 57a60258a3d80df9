"""Functions of torch that a program replaces, and that torch calls while it compiles.

Each pair is made of four words of a grammar: what is replaced, and which function of torch's comes
by it; what is put there, and what that says of itself; since when; and what was there before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._decomp
import torch._inductor.decomposition
import torch._inductor.lowering
import torch.nn.functional as F  # noqa: N812 - as everybody does
from torch import Tensor

from tests.perturb.histories import Call, History

__all__ = ["patches"]

Replacement = Callable[[Callable[..., Any], float], Any]


@dataclass(frozen=True)
class Spot:
    """One function of torch, and a program that comes by it without naming it.

    Attributes:
        place: the module, and the name in it of a class if it is a method.
        name: of the function.
        program: what is compiled.
        other: another function of torch's that takes the same.
    """

    place: str
    name: str
    program: Callable[[Tensor], Any]
    other: Callable[..., Any]

    def owner(self) -> Any:
        module, _, name = self.place.partition(":")
        found = sys.modules[module]
        return getattr(found, name) if name else found


_SPOTS = [
    Spot("torch", "layer_norm", lambda x: F.layer_norm(x, (8,)), torch.sum),
    Spot("torch", "batch_norm", lambda x: F.batch_norm(x, None, None, training=True), torch.sum),
    Spot("torch", "group_norm", lambda x: F.group_norm(x, 2), torch.sum),
    Spot("torch", "relu", lambda x: F.relu(x), torch.sigmoid),
    Spot("torch", "selu", lambda x: F.selu(x), torch.sigmoid),
    Spot("torch", "celu", lambda x: F.celu(x), torch.sigmoid),
    Spot("torch._C._nn", "silu", lambda x: F.silu(x), torch.sigmoid),
    Spot("torch._C._nn", "mish", lambda x: F.mish(x), torch.sigmoid),
    Spot("torch._C._nn", "hardtanh", lambda x: F.hardtanh(x), torch.sigmoid),
    Spot("torch._C._nn", "leaky_relu", lambda x: F.leaky_relu(x), torch.sigmoid),
    Spot("torch._C._nn", "relu6", lambda x: F.relu6(x), torch.sigmoid),
    Spot("torch._C._nn", "elu", lambda x: F.elu(x), torch.sigmoid),
    Spot("torch._C._nn", "glu", lambda x: F.glu(x), torch.sigmoid),
    Spot("torch._C._nn", "mse_loss", lambda x: F.mse_loss(x, x * 2), torch.mul),
    Spot("torch._C._nn", "pad", lambda x: F.pad(x, (1, 1)), torch.sigmoid),
    Spot("torch._VF", "dropout", lambda x: F.dropout(x, 0.0), torch.mul),
    Spot("torch._VF", "einsum", lambda x: torch.einsum("ij,kj->ik", x, x), torch.sigmoid),
    Spot("torch._VF", "cdist", lambda x: torch.cdist(x, x * 2), torch.mul),
    Spot("torch:Tensor", "softmax", lambda x: x.softmax(-1), torch.Tensor.cumsum),
    Spot("torch:Tensor", "softmax", lambda x: F.softmax(x, -1), torch.Tensor.cumsum),
    Spot("torch:Tensor", "sigmoid", lambda x: x.sigmoid(), torch.Tensor.sin),
    Spot("torch:Tensor", "__matmul__", lambda x: x @ x.t(), torch.Tensor.sub),
    Spot("torch:Tensor", "add_", lambda x: x.clone().add_(2), torch.Tensor.mul_),
    Spot("torch:Tensor", "__mul__", lambda x: x * 3, torch.Tensor.add),
    Spot("torch:Tensor", "__rsub__", lambda x: 3 - x, torch.Tensor.add),
    Spot("torch.nn.functional", "relu", lambda x: torch.nn.ReLU()(x), torch.sigmoid),
    Spot("torch.nn.functional", "silu", lambda x: F.silu(x), torch.sigmoid),
]


def _square(x: Tensor) -> Tensor:
    return x @ x.t() + 9 * torch.eye(4)


# More namespaces, most of which a graph names and tracing reads by themselves.
_MORE_SPOTS = [
    Spot("torch.linalg", "inv", lambda x: torch.linalg.inv(_square(x)), torch.sin),
    Spot("torch.linalg", "det", lambda x: torch.linalg.det(_square(x)), torch.sum),
    Spot("torch.linalg", "vector_norm", lambda x: torch.linalg.vector_norm(x), torch.sum),
    Spot("torch.fft", "fft", lambda x: torch.fft.fft(x).real, torch.sin),
    Spot("torch.fft", "fftshift", lambda x: torch.fft.fftshift(x), torch.sin),
    Spot("torch.special", "expit", lambda x: torch.special.expit(x), torch.sin),
    Spot("torch.special", "entr", lambda x: torch.special.entr(x), torch.sin),
    Spot("torch", "nan_to_num", lambda x: torch.nan_to_num(x), torch.sin),
    Spot("torch", "addmm", lambda x: torch.addmm(x, x[:, :4], x), torch.addcmul),
    Spot("torch", "instance_norm", lambda x: F.instance_norm(x[None]), torch.sin),
    Spot("torch", "embedding", lambda x: F.embedding(x[0].abs().long(), x), torch.add),
    Spot("torch", "rrelu", lambda x: F.rrelu(x), torch.sigmoid),
    Spot("torch", "threshold", lambda x: F.threshold(x, 0.1, 2.0), torch.sigmoid),
    Spot("torch", "cosine_similarity", lambda x: F.cosine_similarity(x, x * 2), torch.mul),
    Spot("torch", "pixel_shuffle", lambda x: F.pixel_shuffle(x[None], 2), torch.sin),
    Spot("torch._C._nn", "gelu", lambda x: F.gelu(x), torch.sigmoid),
    Spot("torch._C._nn", "softplus", lambda x: F.softplus(x), torch.sigmoid),
    Spot("torch._C._nn", "hardswish", lambda x: F.hardswish(x), torch.sigmoid),
    Spot("torch._C._nn", "hardsigmoid", lambda x: F.hardsigmoid(x), torch.sigmoid),
    Spot("torch._C._nn", "log_sigmoid", lambda x: F.logsigmoid(x), torch.sigmoid),
    Spot("torch._C._nn", "softshrink", lambda x: F.softshrink(x), torch.sigmoid),
    Spot("torch._C._nn", "l1_loss", lambda x: F.l1_loss(x, x * 2), torch.mul),
    Spot("torch._C._nn", "smooth_l1_loss", lambda x: F.smooth_l1_loss(x, x * 2), torch.mul),
    Spot("torch._C._nn", "huber_loss", lambda x: F.huber_loss(x, x * 2), torch.mul),
    Spot("torch._C._nn", "avg_pool2d", lambda x: F.avg_pool2d(x[None], 2), torch.sin),
    Spot("torch._C._nn", "linear", lambda x: F.linear(x, x), torch.mul),
    Spot("torch._C._nn", "upsample_nearest1d", lambda x: F.interpolate(x[None], 4), torch.sin),
    Spot("torch.nn.functional", "linear", lambda x: F.linear(x, x), torch.mul),
    Spot("torch.nn.functional", "layer_norm", lambda x: torch.nn.LayerNorm(8)(x), torch.sum),
    Spot("torch.nn.functional", "dropout", lambda x: torch.nn.Dropout(0.0)(x), torch.mul),
    Spot("torch.nn.functional", "softmax", lambda x: torch.nn.Softmax(-1)(x), torch.cumsum),
    Spot("torch:Tensor", "sum", lambda x: x.sum(0), torch.Tensor.prod),
    Spot("torch:Tensor", "exp", lambda x: x.exp(), torch.Tensor.sin),
    Spot("torch:Tensor", "view", lambda x: x.view(8, 4), torch.Tensor.reshape),
    Spot("torch:Tensor", "__getitem__", lambda x: x[1:], torch.Tensor.sub),
    Spot("torch:Tensor", "__add__", lambda x: x + 3, torch.Tensor.mul),
    Spot("torch:Tensor", "__neg__", lambda x: -x, torch.Tensor.sin),
    Spot("torch:Tensor", "float", lambda x: x.float() + 1, torch.Tensor.sin),
    Spot("torch:Tensor", "norm", lambda x: x.norm(), torch.Tensor.sum),
    Spot("torch:Tensor", "split", lambda x: x.split(2)[0], torch.Tensor.chunk),
    Spot("torch.functional", "einsum", lambda x: torch.functional.einsum("ij->i", x), torch.sin),
    Spot("torch._refs", "sinc", lambda x: torch.sinc(x), torch.sin),
    Spot("torch._refs", "rot90", lambda x: torch.rot90(x), torch.sin),
    Spot("torch._refs.nn.functional", "mish", lambda x: F.mish(x), torch.sin),
    Spot("torch._refs.special", "entr", lambda x: torch.special.entr(x), torch.sin),
    Spot("torch._prims", "sin", lambda x: torch.sinc(x), torch.cos),
    Spot("torch._decomp.decompositions", "mse_loss", lambda x: F.mse_loss(x, x * 2), torch.mul),
    Spot("torch._decomp.decompositions", "silu", lambda x: F.silu(x), torch.sin),
    Spot("torch._meta_registrations", "meta_mm", lambda x: x @ x.t(), torch.mul),
]


# -- what is put there


def _plainly(original: Callable[..., Any], by: float) -> Any:
    return lambda *args, **kwargs: original(*args, **kwargs) * by


def _wrapping(original: Callable[..., Any], by: float) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * by

    return wrapper


def _allowed(original: Callable[..., Any], by: float) -> Any:
    return torch.compiler.allow_in_graph(_wrapping(original, by))


def _scaled(original: Callable[..., Any], by: float, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) * by


def _forged(original: Callable[..., Any], by: float) -> Any:
    """Text that was made into a function which says that it is torch's."""
    names: dict[str, Any] = {"original": original, "by": by, "__name__": "torch.nn.functional"}
    exec("def forged(*args, **kwargs): return original(*args, **kwargs) * by", names)
    forged = names["forged"]
    forged.__name__ = forged.__qualname__ = getattr(original, "__name__", "forged")
    return forged


class _Callable:
    def __init__(self, original: Callable[..., Any], by: float) -> None:
        self.original, self.by = original, by

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) * self.by

    def method(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) * self.by


_HOWS: dict[str, Replacement] = {
    "plainly": _plainly,
    "wrapping": _wrapping,
    "allowed": _allowed,
    "forged": _forged,
    "partial": lambda original, by: functools.partial(_scaled, original, by),
    "object": _Callable,
    "method": lambda original, by: _Callable(original, by).method,
    "without grad": lambda original, by: torch.no_grad()(_plainly(original, by)),
}


@contextlib.contextmanager
def _patched(spot: Spot, how: str, by: float) -> Iterator[None]:
    owner = spot.owner()
    had = spot.name in vars(owner)
    original = getattr(owner, spot.name)
    new = spot.other if how == "torch's other" else _HOWS[how](original, by)
    if isinstance(owner, type) and not isinstance(new, types.FunctionType):
        new = _wrapping(new, 1.0)
    setattr(owner, spot.name, new)
    try:
        yield
    finally:
        if had:
            setattr(owner, spot.name, original)
        else:
            delattr(owner, spot.name)


# -- tables of operators


@contextlib.contextmanager
def _entry(table: dict[Any, Any], operator: Any, value: Any) -> Iterator[None]:
    before = dict(table)
    table[operator] = value
    try:
        yield
    finally:
        table.clear()
        table.update(before)


_aten = torch.ops.aten
_lowerings = torch._inductor.lowering.lowerings
_decompositions = torch._inductor.decomposition.decompositions


def _lowers(operator: Any, by: float, how: str) -> contextlib.AbstractContextManager[None]:
    old = _lowerings[operator]
    if how == "torch's other":
        return _entry(_lowerings, operator, _lowerings[_aten.cos.default])
    if how == "fallback":
        make = torch._inductor.lowering.fallback_handler
        handler = make(_aten.cos.default, add_to_fallback_set=False)
        return _entry(_lowerings, operator, handler)
    multiplied = functools.partial(_multiplied, old, _lowerings[_aten.mul.Tensor], by)
    if how == "partial":
        return _entry(_lowerings, operator, multiplied)
    plain = lambda x: multiplied(x)  # noqa: E731 - no partial
    wrapped = functools.wraps(old)(plain) if how == "wrapping" else plain
    return _entry(_lowerings, operator, wrapped)


def _multiplied(old: Any, multiply: Any, by: float, x: Any) -> Any:
    return multiply(old(x), by)


def _decomposes(operator: Any, by: float, how: str) -> contextlib.AbstractContextManager[None]:
    def replaced(x: Tensor) -> Tensor:
        return torch.tanh(x) * by

    value: Any = replaced
    if how == "torch's other":
        value = _decompositions[_aten.mish.default]
    elif how == "wrapping":
        value = functools.wraps(_decompositions[_aten.mish.default])(replaced)
    elif how == "partial":
        value = functools.partial(_scaled, torch.tanh, by)
    return _entry(_decompositions, operator, value)


_TABLES: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "lowering of sin": (lambda x: x.sin() + 1, functools.partial(_lowers, _aten.sin.default)),
    "lowering of exp": (lambda x: x.exp() + 1, functools.partial(_lowers, _aten.exp.default)),
    "decomposition of silu": (
        lambda x: F.silu(x) + 1,
        functools.partial(_decomposes, _aten.silu.default),
    ),
    "decomposition of hardswish": (
        lambda x: F.hardswish(x) + 1,
        functools.partial(_decomposes, _aten.hardswish.default),
    ),
}


# -- pairs

Context = Callable[[], contextlib.AbstractContextManager[Any]]


def _input() -> tuple[Tensor]:
    return (torch.linspace(-2, 2, 32).reshape(4, 8),)


def _pair(name: str, program: Any, make: Callable[[float], Context], since: str) -> History:
    plain = contextlib.nullcontext
    first = make(2.0) if "another" in since else plain
    early = "before" in since
    return History(
        "patching",
        f"{name}, {since}",
        program,
        (Call(_input, forward=first),),
        (Call(_input, forward=plain if early else make(3.0)),),
        around=make(3.0) if early else plain,
        as_cold=True,
    )


_SINCE = ("after enable", "before enable", "after another", "before enable, after another")


def _at(context: Any, how: str) -> Callable[[float], Context]:
    return lambda by: functools.partial(context, by, how)


def patches() -> Iterator[History]:
    """Each spot with several replacements, at each time; each table with each."""
    hows = itertools.cycle(_HOWS)
    sinces = itertools.cycle(_SINCE)
    for spot in _SPOTS:
        for how in (next(hows), "torch's other"):
            since = "after enable" if how == "torch's other" else next(sinces)
            yield _pair(
                f"{spot.place}.{spot.name} {how}",
                spot.program,
                functools.partial(functools.partial, _patched, spot, how),
                since,
            )
    for name, (program, context) in _TABLES.items():
        hows_here = ["plainly", "wrapping", "partial", "torch's other"]
        if name.startswith("lowering"):
            hows_here.append("fallback")
        for how in hows_here:
            since = "after enable" if how in ("torch's other", "fallback") else next(sinces)
            yield _pair(
                f"{name} {how}",
                program,
                _at(context, how),
                since,
            )
    yield from _more()


def _more() -> Iterator[History]:
    """Each spot of all with each replacement, at one time and the other."""
    ways = [*_HOWS, "torch's other"]
    for number, spot in enumerate((*_SPOTS, *_MORE_SPOTS)):
        for turn, how in enumerate(ways):
            since = _SINCE[(number + turn) % len(_SINCE)]
            pair = _pair(
                f"{spot.place}.{spot.name} {how}, each",
                spot.program,
                functools.partial(functools.partial, _patched, spot, how),
                "after enable" if how == "torch's other" else since,
            )
            yield replace(pair, native=False)
    for name, (program, context) in _TABLES.items():
        for how, since in itertools.product(("plainly", "wrapping", "partial"), _SINCE):
            yield _pair(f"{name} {how}, each", program, _at(context, how), since)
