"""Attributes replaced in somebody else's classes and modules, and put back exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["Patches"]

_ABSENT = object()


class Patches:
    """A stack of replaced attributes."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; what the owner itself held, if anything, is kept."""
        old = vars(owner).get(name, _ABSENT)
        undo = (
            partial(delattr, owner, name) if old is _ABSENT else partial(setattr, owner, name, old)
        )
        setattr(owner, name, value)
        self._undo.append(undo)

    def configure(self, config: Any, name: str, value: Any) -> None:
        """Set an option of one of torch's config modules."""
        old = getattr(config, name)
        setattr(config, name, value)
        self._undo.append(partial(setattr, config, name, old))

    def undo(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            self._undo.pop()()
