"""Programs, and pairs of them: the second program runs on the cache that the first one has filled.

A program is played with a function in the place of ``torch.compile``, and yields what its caller
can observe after each step. So one program runs eagerly, compiled, and compiled with a cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

Compile: TypeAlias = Callable[..., Any]
Context: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]


def eagerly(function: Any, **_: Any) -> Any:
    """Run a program without a compiler."""
    return function


class Playable(Protocol):
    """A program."""

    def play(self, compile_it: Compile) -> Iterator[Any]:
        """Run the program; yield everything observable after each step, also an error's text."""


@dataclass(frozen=True)
class Call:
    """A call of the compiled function, with or without a backward.

    Attributes:
        make: returns new arguments each time.
        forward: the context of the call.
        backward: the context of the backward; ``None`` for no backward.
        keep: whether the backward keeps its graph.
    """

    make: Callable[[], tuple[Any, ...]]
    forward: Context = contextlib.nullcontext
    backward: Context | None = None
    keep: bool = False

    def perform(self, function: Callable[..., Any], parameters: Iterable[Tensor]) -> Any:
        """Return outputs, touched tensors and their gradients, or the class of the error."""
        args = self.make()
        touched = [each for each in (*args, *parameters) if isinstance(each, Tensor)]
        for each in touched:
            if each.requires_grad and not each.is_leaf:
                each.retain_grad()
        try:
            with self.forward():
                result = function(*args)
            outputs = result if isinstance(result, (list, tuple)) else [result]
            if self.backward is not None:
                with self.backward():
                    losses = [_loss(each) for each in outputs if isinstance(each, Tensor)]
                    wanted = [each for each in losses if each is not None]
                    if wanted:
                        sum(wanted[1:], wanted[0]).backward(retain_graph=self.keep)
        except Exception as exc:
            return f"raises {type(exc).__name__}"  # the order in torch's message is not fixed
        grads = [each.grad for each in touched if each.is_leaf or each.retains_grad]
        return [outputs, touched, grads]


def _loss(output: Tensor) -> Tensor | None:
    if not output.requires_grad or output.is_meta or output.is_inference():
        return None
    flat = output.float().reshape(-1)
    return (flat * torch.arange(1.0, 1 + flat.numel(), device=flat.device).cos()).sum()


@dataclass(frozen=True)
class Program:
    """A function that is compiled and called.

    Attributes:
        function: the function, or a function that returns a new module each time, which is
            compiled, and its parameters are observed too.
        calls: in their order.
        options: of ``torch.compile``.
        context: of making, compiling and running it.
        makes_module: whether ``function`` returns a module.
    """

    function: Callable[..., Any]
    calls: tuple[Call, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    context: Context = contextlib.nullcontext
    makes_module: bool = False

    def play(self, compile_it: Compile) -> Iterator[Any]:
        torch.manual_seed(0)
        with self.context():
            function = self.function() if self.makes_module else self.function
            parameters = [*function.parameters()] if isinstance(function, nn.Module) else []
            compiled = compile_it(function, **self.options)
            for call in self.calls:
                yield call.perform(compiled, parameters)


def once(function: Callable[..., Any], make: Callable[[], tuple[Any, ...]], **how: Any) -> Program:
    """Return a program of one call and a backward."""
    return Program(function, (Call(make, backward=torch.enable_grad),), **how)


@dataclass(frozen=True)
class Pair:
    """A program that fills a cache, and another one that uses it: it must miss or be right.

    Attributes:
        family, name: the kind of difference between the two, and the difference.
        must_hit: whether the second program has to hit, because the difference does not matter.
        all_hit: whether it must not miss either, unless a graph is bypassed.
        by_key: whether the second program runs only if its key is that of the first one, as it
            would otherwise miss. This needs no compilation.
        around: the context of the second program, entered before the cache is enabled.
        as_cold: whether the second program must do the same as a cold compile; otherwise it may
            also do the same as eager mode.
        native: whether Inductor generates C++. Otherwise the code calls each operator, which
            compiles in a tenth of the time, with the same guards and backwards.
        filled: a name for the cache of the first program; pairs with the same name share it.
        recall: whether frames are recalled too.
    """

    family: str
    name: str
    first: Playable
    second: Playable
    must_hit: bool = False
    all_hit: bool = False
    by_key: bool = False
    around: Context = contextlib.nullcontext
    as_cold: bool = False
    native: bool = True
    filled: str = ""
    recall: bool = False

    def __str__(self) -> str:
        return f"{self.family}: {self.filled + ': ' if self.by_key else ''}{self.name}"


def calling(
    family: str,
    name: str,
    function: Callable[..., Any],
    first: tuple[Call, ...],
    second: tuple[Call, ...],
    options: Mapping[str, Any] | None = None,
    **how: Any,
) -> Pair:
    """Return a pair of programs that call one function in two ways."""
    one, other = (Program(function, calls, options or {}) for calls in (first, second))
    return Pair(family, name, one, other, **how)
