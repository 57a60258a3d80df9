"""The names that each program of the table finds in its module."""

from __future__ import annotations

import builtins
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

x = torch.linspace(-2, 2, 16)


def library(name: str, text: str) -> ModuleType:
    """Write a module, import it again, and return it, as after an edit on this machine."""
    place = Path(sys.path[0])
    place.joinpath(f"{name}.py").write_text(text, encoding="utf-8")
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def trained(g: Any, *args: Any, of: Any = ()) -> list[Any]:
    """Return outputs, and the gradients of the arguments and of the parameters of a module."""
    args = tuple(
        each.detach().clone().requires_grad_() if isinstance(each, Tensor) else each
        for each in args
    )
    outputs = g(*args)
    outputs.square().sum().backward()
    leaves = [each for each in args if isinstance(each, Tensor)]
    leaves += [*of.parameters()] if isinstance(of, torch.nn.Module) else [*of]
    return [outputs, *(each.grad for each in leaves)]


def layer() -> torch.nn.Module:
    """Return a layer with the same weights in each process."""
    torch.manual_seed(0)
    return torch.nn.Linear(16, 2)


def stepped(step: Any, of: torch.nn.Module, times: int = 2) -> list[Any]:
    """Train a module with ``step``; return its parameters."""
    for _ in range(times):
        of.zero_grad()
        of(x).square().sum().backward()
        step()
    return [each.detach().clone() for each in of.parameters()]


class Scaler:
    """An object that scales by its attribute."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, value: Any) -> Any:
        return value * self.by

    def apply(self, value: Any) -> Any:
        return value * self.by


def double(value: Any) -> Any:
    return value * 2


def triple(value: Any) -> Any:
    return value * 3


def made(by: float) -> Any:
    """Return a function with the same code, name and line for every ``by``."""

    def inner(value: Any) -> Any:
        return value * by

    return inner


def defaulted(by: float) -> Any:
    def inner(value: Any, factor: float = by) -> Any:
        return value * factor

    return inner


def keyworded(by: float) -> Any:
    def inner(value: Any, *, factor: float = by) -> Any:
        return value * factor

    return inner


def classed(by: float, base: type = object) -> Any:
    """Return a class with the same name for every ``by``."""

    class Classed(base):  # type: ignore[misc]
        k = by

        def apply(self, value: Any) -> Any:
            return value * self.k

        @staticmethod
        def still(value: Any) -> Any:
            return value * by

    return Classed


def compiled_text(text: str, name: str = "f") -> Any:
    """Return a function made by ``exec``, as by code generators; its file does not exist."""
    space: dict[str, Any] = {"torch": torch}
    exec(compile(text, "<generated>", "exec"), space)
    return space[name]


#: What a wrapper adds, of which its class has no text.
SHIFTS = [0]


class Wrapped(Tensor):
    """A tensor with a factor, like a quantized weight."""

    SHIFT = 0

    @staticmethod
    def __new__(cls, inner: Any, by: float) -> Wrapped:
        """Make a wrapper of the size of ``inner``."""
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: Any, by: float) -> None:
        self.held, self.by = inner, by

    def __tensor_flatten__(self) -> tuple[list[str], list[float]]:
        return ["held"], [self.by]

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["held"], *meta)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on plain tensors."""
        shift = cls.SHIFT + SHIFTS[0]
        plain = [x.held * x.by + shift if isinstance(x, Wrapped) else x for x in args]
        return func(*plain, **(kwargs or {}))


__all__ = [*(name for name in dir() if not name.startswith("_")), "builtins"]
