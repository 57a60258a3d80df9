"""What operators are registered as, with torch's dispatcher and beside it.

Each pair is made of four words of a grammar: which operator, the user's own or one of torch's; what
is registered for it, with a number in it; where that function is from; and since when.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody does
from torch import Tensor

from tests.perturb.histories import Call, History

__all__ = ["registrations"]

Context = Callable[[], contextlib.AbstractContextManager[Any]]
_NAMESPACE = "s3cache_registering"
_OPERATOR = f"{_NAMESPACE}::op"


def _op(x: Tensor) -> Any:
    return torch.ops.s3cache_registering.op(x)


# -- where a function is from: each gives one that calculates ``text`` of ``x`` and ``by``


def _from_text(text: str, by: int) -> Any:
    names: dict[str, Any] = {"torch": torch, "by": by}
    exec(f"def registered(x): return {text}", names)
    return names["registered"]


def _from_another_file(text: str, by: int) -> Any:
    names: dict[str, Any] = {"torch": torch, "by": by}
    exec(compile(f"def registered(x): return {text}", "/tmp/another.py", "exec"), names)
    return names["registered"]


def _from_a_notebook(text: str, by: int) -> Any:
    names: dict[str, Any] = {"torch": torch, "by": by, "__name__": "__main__"}
    exec(compile(f"registered = lambda x: {text}", "<ipython-input-1>", "exec"), names)
    return names["registered"]


def _helped(calculate: Any, by: int, x: Tensor) -> Any:
    return calculate(x, by)


def _partially(text: str, by: int) -> Any:
    calculate = eval(f"lambda x, by: {text}", {"torch": torch})
    return functools.partial(_helped, calculate, by)


class _Calculates:
    def __init__(self, calculate: Any, by: int) -> None:
        self.calculate, self.by = calculate, by

    def __call__(self, x: Tensor) -> Any:
        return self.calculate(x, self.by)

    def method(self, x: Tensor) -> Any:
        return self.calculate(x, self.by)


def _of_an_object(text: str, by: int) -> Any:
    return _Calculates(eval(f"lambda x, by: {text}", {"torch": torch}), by)


def _by_a_method(text: str, by: int) -> Any:
    return _of_an_object(text, by).method


def _in_a_closure(text: str, by: int) -> Any:
    make = eval(f"lambda by: lambda x: {text}", {"torch": torch})
    return make(by)


def _by_default(text: str, by: int) -> Any:
    names: dict[str, Any] = {"torch": torch, "BY": by}
    exec(f"def registered(x, *, by=BY): return {text}", names)
    return names["registered"]


def _wrapped(text: str, by: int) -> Any:
    """It says that it is a function of torch's."""
    inner = _from_text(text, by)
    return functools.wraps(F.gelu)(lambda x: inner(x))


def _through_a_helper(text: str, by: int) -> Any:
    names: dict[str, Any] = {"torch": torch, "KEPT": {"by": [by]}}
    exec(
        f"def helper(x, by): return {text}\ndef registered(x): return helper(x, KEPT['by'][0])",
        names,
    )
    return names["registered"]


_SOURCES = {
    "text": _from_text,
    "another file": _from_another_file,
    "a notebook": _from_a_notebook,
    "a partial": _partially,
    "an object": _of_an_object,
    "a method": _by_a_method,
    "a closure": _in_a_closure,
    "a default": _by_default,
    "a wrapper": _wrapped,
    "a helper": _through_a_helper,
}


# -- what is registered


@dataclass(frozen=True)
class Kind:
    """One way in which an operator of the user's depends on a number.

    Attributes:
        register: registers it with the library, given what makes functions, and the number.
        program: calls it.
        kernel: what is calculated on the processor; ``""`` if that is registered by ``register``.
        fake: whether there is an implementation for fake tensors.
        tags: of the operator.
    """

    register: Callable[[Any, Callable[[str], Any], int], None]
    program: Callable[[Tensor], Any] = lambda x: _op(x) + 1
    kernel: str = "x * 2"
    fake: bool = True
    tags: Callable[[int], tuple[torch.Tag, ...]] = lambda _: ()


def _at(key: str, text: str) -> Callable[[Any, Callable[[str], Any], int], None]:
    return lambda library, make, by: library.impl("op", make(text), key)


def _autocast_to(library: Any, make: Any, by: int) -> None:
    dtype = torch.bfloat16 if by == 2 else torch.float16
    torch.library.register_autocast(_OPERATOR, "cpu", dtype, lib=library)


def _backward(library: Any, make: Any, by: int) -> None:
    formula = make("x * by")
    torch.library.register_autograd(_OPERATOR, lambda ctx, grad: formula(grad), lib=library)


def _vmap(library: Any, make: Any, by: int) -> None:
    rule = make("x * by")
    torch.library.register_vmap(_OPERATOR, lambda info, dims, x: (rule(x), 0), lib=library)


def _under_autocast(x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _op(x)


_FIXED, _FLEXIBLE = torch.Tag.needs_fixed_stride_order, torch.Tag.flexible_layout
_KINDS = {
    "meta": Kind(_at("Meta", "x.repeat(by, 1)"), kernel="x.repeat(by, 1)", fake=False),
    "explicit": Kind(_at("CompositeExplicitAutograd", "x.repeat(by, 1)"), kernel="", fake=False),
    "implicit": Kind(_at("CompositeImplicitAutograd", "x * by"), kernel="", fake=False),
    "autograd": Kind(_at("Autograd", "x * by")),
    "autograd of a device": Kind(_at("AutogradCPU", "torch.sin(x) * by")),
    "autocast": Kind(_at("AutocastCPU", "x * by"), _under_autocast),
    "autocast to": Kind(_autocast_to, _under_autocast, "x.clone()"),
    "backward": Kind(_backward),
    "vmap": Kind(_vmap, lambda x: torch.vmap(torch.ops.s3cache_registering.op)(x) + 1),
    "tags": Kind(
        lambda *_: None,
        lambda x: _op(x.t() * 2),
        "x.contiguous() * x.stride(0)",
        tags=lambda by: (_FIXED if by == 2 else _FLEXIBLE,),
    ),
}


@contextlib.contextmanager
def _defined(kind: Kind, source: str, by: int) -> Iterator[None]:
    make = functools.partial(_made, source, by)
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    try:
        library.define("op(Tensor x) -> Tensor", tags=kind.tags(by))
        if kind.kernel:
            library.impl("op", make(kind.kernel), "CPU")
        if kind.fake:
            torch.library.register_fake(_OPERATOR, torch.empty_like, lib=library)
        kind.register(library, make, by)
        yield
    finally:
        library._destroy()


def _made(source: str, by: int, text: str) -> Any:
    return _SOURCES[source](text, by)


_PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "silu": lambda x: F.silu(x) + 1,
    "mish": lambda x: F.mish(x) + 1,
    "hardswish": lambda x: F.hardswish(x) + 1,
    "sinc": lambda x: torch.sinc(x) + 1,
}


def _called(name: str, x: Tensor) -> Any:
    function = getattr(F, name, None) or getattr(F, name.replace("_", ""), None)
    return (function or getattr(torch, name))(x) + 1


_KEYS = ("AutogradCPU", "CompositeImplicitAutograd", "CPU", "AutocastCPU", "Meta")


def _is_composite(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        f"aten::{name}", "CompositeImplicitAutograd"
    )


@contextlib.contextmanager
def _overridden(name: str, key: str, source: str, by: int) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    text = "x.new_empty(x.shape)" if key == "Meta" else "torch.sin(x) * by"
    try:
        library.impl(name, _SOURCES[source](text, by), key)
        yield
    finally:
        library._destroy()


# -- pairs


def _input() -> tuple[Tensor]:
    return (torch.linspace(-2, 2, 32).reshape(4, 8).requires_grad_(),)


_SINCE = ("after enable", "before enable")


def _pair(name: str, program: Any, first: Context, second: Context, since: str) -> History:
    plain = contextlib.nullcontext
    early = since == "before enable"
    return History(
        "registering",
        f"{name}, {since}",
        program,
        (Call(_input, forward=first, backward=plain),),
        (Call(_input, forward=plain if early else second, backward=plain),),
        around=second if early else plain,
        as_cold=True,
    )


def registrations() -> Iterator[History]:
    """Each kind from two places, each override of each operator from one, at each time."""
    sources = itertools.cycle(_SOURCES)
    sinces = itertools.cycle(_SINCE)
    for name, kind in _KINDS.items():
        for source in (next(sources), next(sources)):
            for since in _SINCE:
                first, second = (functools.partial(_defined, kind, source, by) for by in (2, 3))
                yield _pair(f"{name} from {source}", kind.program, first, second, since)
    for name in ("meta", "implicit", "autograd", "backward"):
        same = functools.partial(_defined, _KINDS[name], "text", 2)
        pair = _pair(f"{name} as before", _KINDS[name].program, same, same, "after enable")
        yield replace(pair, must_hit=True)
    for name, program in _PROGRAMS.items():
        for key in _KEYS:
            source = next(sources)
            second = functools.partial(_overridden, name, key, source, 3)
            yield _pair(
                f"aten::{name} for {key} from {source}",
                program,
                contextlib.nullcontext,
                second,
                next(sinces),
            )
    yield from _more()


_MORE_PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    **_PROGRAMS,
    **{
        name: functools.partial(_called, name)
        for name in (
            "relu", "sigmoid", "tanh", "exp", "hardsigmoid", "softplus", "elu", "selu", "gelu",
            "log_sigmoid", "celu", "leaky_relu", "sin", "erf", "expm1", "rsqrt",
        )
    },
}  # fmt: skip
_MORE_KEYS = (*_KEYS, "Autograd", "CompositeExplicitAutograd")


def _more() -> Iterator[History]:
    """Each kind from each place at each time; each key of more operators of torch's, at each."""
    for (name, kind), source, since in itertools.product(_KINDS.items(), _SOURCES, _SINCE):
        first, second = (functools.partial(_defined, kind, source, by) for by in (2, 3))
        pair = _pair(f"{name} from {source} once more", kind.program, first, second, since)
        yield replace(pair, native=False)
    for (name, kind), source in itertools.product(_KINDS.items(), _SOURCES):
        same = functools.partial(_defined, kind, source, 2)
        pair = _pair(f"{name} from {source} as before", kind.program, same, same, "after enable")
        yield replace(pair, native=False)
    sources = itertools.cycle(_SOURCES)
    for (name, program), key, since in itertools.product(
        _MORE_PROGRAMS.items(), _MORE_KEYS, _SINCE
    ):
        if key == "Meta" and _is_composite(name):
            continue  # torch takes none
        source = next(sources)
        second = functools.partial(_overridden, name, key, source, 3)
        pair = _pair(
            f"aten::{name} for {key} from {source} once more",
            program,
            contextlib.nullcontext,
            second,
            since,
        )
        yield replace(pair, native=False, filled=f"aten::{name}")
