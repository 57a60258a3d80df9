"""A job with a graph that has a user's object in its entry, which compiles as it is unpickled."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import s3cache
from tests.hooks.jobs import account


@torch.compile
def inner(x: torch.Tensor) -> torch.Tensor:
    return (x * 5).sum()


def note(name: str) -> Note:
    assert float(inner(torch.ones(3))) == 15
    return Note(name)


class Note:
    """What a :class:`Noted` says of itself; made anew, it needs a compiled graph."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Note) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return note, (self.name,)


class Noted(torch.Tensor):
    """A tensor with a note, which is a part of what is compiled."""

    wrapped: torch.Tensor
    note: Note

    @staticmethod
    def __new__(cls, inner: torch.Tensor, note: Note) -> Noted:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor, note: Note) -> None:
        self.wrapped, self.note = inner, note

    def __tensor_flatten__(self) -> tuple[list[str], Note]:
        return ["wrapped"], self.note

    @staticmethod
    def __tensor_unflatten__(tensors: Any, note: Note, size: Any, stride: Any) -> Noted:
        return Noted(tensors["wrapped"], note)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own names none of its arguments
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        noted = [each for each in tree_leaves(args) if isinstance(each, Noted)]
        plain = tree_map(lambda each: each.wrapped if isinstance(each, Noted) else each, args)
        out = tree_map(
            lambda each: Noted(each, noted[0].note) if isinstance(each, torch.Tensor) else each,
            func(*plain, **(kwargs or {})),
        )
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


def compile_noted(url: str) -> dict[str, Any]:
    """Compile a graph whose entry holds a note, and run it."""
    for kind in (Note, Noted):  # what they come by is compiled itself
        s3cache.register_cacheable(kind, version="1")
    with s3cache.enabled(url) as cache:
        result = torch.compile(lambda x: x * 2 + 1)(Noted(torch.ones(4), Note("a")))
        cache.flush()
        return {**account(cache), "result": result.wrapped.tolist(), "note": result.note.name}
