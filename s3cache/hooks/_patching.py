"""Functions of torch replaced where it has them, and put back exactly."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TypeVar

from s3cache.graph import ORIGINAL_ATTR
from s3cache.torch_api import Internal
from s3cache.torch_api.protocols import Function

__all__ = ["Patches"]

F = TypeVar("F", bound=Function[object])
T = TypeVar("T")

_ABSENT = object()


class Patches:
    """A stack of replaced functions."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, internal: Internal[F], make: Callable[[F], F]) -> None:
        """Put what ``make`` makes of a function in its place.

        A static or class method stays one; ``make`` gets and returns the plain function, which of
        a class method takes the class first. What the owner itself held, if anything, is kept.

        Raises:
            UnsupportedTorchError: this torch lacks it.
        """
        owner, name = internal.owner()
        present = inspect.getattr_static(owner, name)
        wrapped = isinstance(present, (staticmethod, classmethod))
        original: F = present.__func__ if wrapped else present
        replacement: object = make(original)
        if isinstance(replacement, FunctionType):  # of a function of the user's it is still in keys
            vars(replacement)[ORIGINAL_ATTR] = original
        old = vars(owner).get(name, _ABSENT)
        setattr(owner, name, type(present)(replacement) if wrapped else replacement)
        self._undo.append(
            partial(delattr, owner, name) if old is _ABSENT else partial(setattr, owner, name, old)
        )

    def set(self, internal: Internal[T], value: T) -> None:
        """Give an option that value.

        Raises:
            UnsupportedTorchError: this torch lacks it.
        """
        owner, name = internal.owner()
        self._undo.append(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def at_undo(self, call: Callable[[], None]) -> None:
        """Call this when everything is put back, in its turn."""
        self._undo.append(call)

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            self._undo.pop()()
