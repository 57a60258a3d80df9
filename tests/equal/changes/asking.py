"""User code that reads state of the process, which is part of the key at the second level.

Each pair of programs combines two choices: the user code that takes part in tracing, and the state
that it reads of the process, of Python's modules, of NumPy or of tensors. The second program reads
another state, so its cold compile makes other code: it must not hit the entry of the first.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import torch._inductor.lowering
from torch import Tensor
from torch._inductor import decomposition
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.equal.programs import Call, Pair, calling
from tests.support.switches import switched

Ask = Callable[[], int]
_aten = torch.ops.aten

# -- state: each item is a question with the answer 0 or 1, and a context that sets the answer


class _Place:
    """An object somewhere in a program."""

    value = 0
    there: Any = None


_variable: contextvars.ContextVar[int] = contextvars.ContextVar("s3cache_asking", default=0)
_tensor = torch.zeros(3, requires_grad=True)


def _set(owner: Any, name: str, *values: Any) -> Callable[[int], Any]:
    return lambda to: patch.object(owner, name, values[to], create=True)


def _file(there: bool) -> None:
    _path().touch() if there else _path().unlink(missing_ok=True)


def _path() -> Path:
    return Path(tempfile.gettempdir(), "s3cache-asking")


_READS: dict[str, tuple[Ask, Callable[[int], Any]]] = {
    "an environment variable": (
        lambda: int(os.environ.get("ASKED_BY_A_PROGRAM", "0")),
        lambda to: patch.dict(os.environ, {"ASKED_BY_A_PROGRAM": str(to)}),
    ),
    "NumPy's error state": (
        lambda: np.geterr()["divide"] == "raise",
        lambda to: np.errstate(divide=("warn", "raise")[to]),
    ),
    "filters of warnings": (
        lambda: any("s3cache_asking" in str(each) for each in warnings.filters),
        lambda to: patch.object(
            *(warnings, "filters"),
            [*[("ignore", re.compile("s3cache_asking"), Warning, None, 0)] * to, *warnings.filters],
        ),
    ),
    "a context variable": (_variable.get, lambda to: switched(_variable.get, _variable.set, to)),
    "a file": (lambda: _path().exists(), lambda to: switched(_path().exists, _file, bool(to))),
    "an attribute": (lambda: _Place.value, _set(_Place, "value", 0, 1)),
    "a tensor's grad": (
        lambda: _tensor.grad is not None,
        _set(_tensor, "grad", None, torch.ones(3)),
    ),
    "a storage around a view": (
        lambda: _Place.there.untyped_storage().nbytes() > 12,
        lambda to: patch.object(_Place, "there", torch.zeros(9 if to else 3)[:3]),
    ),
}

# -- code that reads state: a context that registers it, and a program for which torch runs it

_names = itertools.count()


def _by(ask: Ask) -> float:
    return 2.0 + ask()


def _custom(register: Callable[[Any, Ask], None], call: Any = None) -> Any:
    """Return a custom operator with rules; both programs of a pair have the same name for it."""
    name = f"s3cache_asking::op{next(_names)}"

    @contextlib.contextmanager
    def registered(ask: Ask) -> Iterator[None]:
        def forward(x: Tensor) -> Tensor:
            return x * 2

        definition = torch.library.custom_op(name, forward, mutates_args=())
        definition.register_fake(torch.empty_like)
        definition.register_autograd(lambda ctx, grad: grad * 2)
        register(definition, ask)
        try:
            yield
        finally:
            definition._lib._destroy()

    def program(x: Tensor) -> Any:
        operator = getattr(torch.ops.s3cache_asking, name.partition("::")[2])
        return (call or (lambda operator, x: operator(x).sin()))(operator, x)

    return registered, program


def _formula(definition: Any, ask: Ask) -> None:
    definition.register_autograd(lambda ctx, grad: grad * _by(ask))


def _vmap(definition: Any, ask: Ask) -> None:
    definition.register_vmap(lambda info, dims, x: (x * _by(ask), dims[0]))


def _strides(definition: Any, ask: Ask) -> None:
    """The layout of the result is by rows or by columns, which no line of a graph shows."""

    def laid_out(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[::-1]).t() if ask() else torch.empty_like(x)

    definition.register_fake(laid_out)
    definition.register_kernel("cpu", lambda x: laid_out(x).copy_(x * 2))


def _sizes(definition: Any, ask: Ask) -> None:
    definition.register_fake(lambda x: x.new_empty(x.shape[0] + ask(), x.shape[1]))
    definition.register_kernel("cpu", lambda x: torch.cat([x * 2, x.new_zeros(ask(), x.shape[1])]))
    definition.register_autograd(lambda ctx, grad: grad[:4] * 2)


def _library(key: str) -> Any:
    name = f"op{next(_names)}"

    @contextlib.contextmanager
    def registered(ask: Ask) -> Iterator[None]:
        library = torch.library.Library("s3cache_asking_more", "FRAGMENT")
        library.define(f"{name}(Tensor x) -> Tensor")
        with contextlib.ExitStack() as stack:
            stack.callback(library._destroy)
            if key != "a table":
                library.impl(name, lambda x: x * _by(ask), key)
            else:
                library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
                own = {_operator(name).default: lambda x: x * _by(ask)}
                for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
                    stack.enter_context(patch.dict(table, own))
            yield

    return registered, lambda x: _operator(name)(x).sin()


def _operator(name: str) -> Any:
    return getattr(torch.ops.s3cache_asking_more, name)


_question: list[Ask] = [lambda: 0]


@contextlib.contextmanager
def _answering(ask: Ask) -> Iterator[None]:
    with patch.object(sys.modules[__name__], "_question", [ask]):
        yield


@torch._dynamo.allow_in_graph
def _kept(x: Tensor) -> Tensor:
    return x * _by(_question[0])


class _Wrapped(torch.Tensor):
    inner: Any

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [each.inner if isinstance(each, cls) else each for each in args]
        return cls(func(*plain, **(kwargs or {})) * _by(_question[0]))

    def _stable_hash_for_caching(self) -> str:
        return "wrapped"


def _exchanging(ask: Ask, graph: Any) -> None:
    """Replace each sine with a cosine if the answer is 1."""
    for node in graph.nodes:
        if node.target is _aten.sin.default and ask():
            node.target = _aten.cos.default


def _pass(config: Any, option: str) -> Callable[[Ask], Any]:
    def registered(ask: Ask) -> Any:
        def mine(graph: Any, *_: Any) -> Any:
            _exchanging(ask, getattr(graph, "graph", graph))
            return graph

        return config.patch({option: mine})

    return registered


def _reading_nodes(ask: Ask) -> Any:
    """A pass leaves the answer as a mark on each node."""

    def mark(graph: Any) -> None:
        for node in graph.nodes:
            node.meta["s3cache_asking"] = ask()

    return inductor.patch(joint_custom_pre_pass=mark)


def _checkpointed(x: Tensor) -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(_question[0]()) == (op is _aten.mm.default)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(lambda x: (x @ x.t()).sin(), x, use_reentrant=False, context_fn=contexts)


def _sine(x: Tensor) -> Tensor:
    return x.sin() * 3


_TRACED: dict[str, tuple[Callable[[Ask], Any], Callable[..., Any]]] = {
    "backward formula": _custom(_formula),
    "strides of a fake": _custom(_strides),
    "sizes of a fake": _custom(_sizes),
    "vmap rule": _custom(_vmap, lambda operator, x: torch.vmap(operator)(x)),
    "decomposition": _library("a table"),
    "decomposing kernel": _library("CompositeImplicitAutograd"),
    "autograd kernel": _library("Autograd"),
    "kept function": (_answering, lambda x: _kept(x).sin()),
    "tensor subclass": (_answering, lambda x: x.sin()),
    "joint pass": (_pass(inductor, "joint_custom_pre_pass"), _sine),
    "joint pass of functorch": (_pass(functorch, "joint_custom_pass"), _sine),
    "marks on nodes": (_reading_nodes, _sine),
    "checkpoint policy": (_answering, _checkpointed),
}
_WITH_BACKWARD = ("backward formula", "strides of a fake", "sizes of a fake", "checkpoint policy")


def asked() -> Iterator[Pair]:
    """Yield each code with each state, which changes; in some pairs it stays the same."""
    pairs = itertools.product(_TRACED.items(), _READS.items())
    for number, ((code, (register, program)), (state, (ask, make))) in enumerate(pairs):
        same = number % 5 == 0
        inputs = _wrapped if code == "tensor subclass" else _matrix
        backward = contextlib.nullcontext if code in _WITH_BACKWARD else None
        first, second = (
            Call(inputs, functools.partial(_around, register, ask, make, to), backward)
            for to in (0, 0 if same else 1)
        )
        yield calling(
            "asking",
            f"{code} reads {state}{', which is the same' if same else ''}",
            program,
            (first,),
            (second,),
            must_hit=same,
            as_cold=True,
            native=False,
        )


def _matrix() -> tuple[Tensor, ...]:
    return (torch.linspace(-1, 1, 16).view(4, 4).requires_grad_(),)


def _wrapped() -> tuple[Tensor, ...]:
    return (_Wrapped(torch.linspace(-1, 1, 16).view(4, 4)),)


@contextlib.contextmanager
def _around(register: Any, ask: Ask, make: Any, to: int) -> Iterator[None]:
    with register(ask), make(to):
        yield
