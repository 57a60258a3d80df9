"""Inputs that lie in one storage, or somewhere inside of one: what later calls of a hit meet."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.perturb.histories import Call, History

__all__ = ["guards", "offsets", "subclasses"]


def _flat(size: int) -> Tensor:
    return torch.arange(1.0, 1 + size)


# -- two inputs: where they lie, and what is done to them

# Of inputs of n elements in one storage: where the second begins behind the first, and the step.
_BEHIND: dict[str, Callable[[int], tuple[int, int]]] = {
    "beside": lambda n: (2 * n, 1),
    "touching": lambda n: (n, 1),
    "overlapping": lambda n: (1, 1),
    "half over": lambda n: (n // 2, 1),
    "equal": lambda n: (0, 1),
    "interleaved": lambda n: (1, 2),
    "interleaved and over": lambda n: (2, 2),
}
_RELATIONS = ("apart", "one", *_BEHIND)


def _related(relation: str, n: int, start: int, swapped: bool) -> tuple[Tensor, Tensor]:
    """Two inputs of ``n`` elements; the first in its storage begins at ``start``."""
    if relation == "apart":
        pair = _flat(n), _flat(n) * 3
    elif relation == "one":
        pair = (one := _flat(n)), one
    else:
        behind, step = _BEHIND[relation](n)
        flat = _flat(5 * n)
        first, second = flat[start:], flat[start + behind :]
        pair = first[: n * step : step], second[: n * step : step]
    return pair[::-1] if swapped else pair


def _first_doubled(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return a + b


def _both_changed(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    b.add_(1)
    return a * b


def _copied(a: Tensor, b: Tensor) -> Tensor:
    a.copy_(b.sin())
    return b + 1


def _part_changed(a: Tensor, b: Tensor) -> Tensor:
    a[1:].add_(b[:-1])
    return a.cos() + b


_CHANGES = (_first_doubled, _both_changed, _copied, _part_changed)


def guards() -> Iterator[History]:
    """What is cached for inputs in one relation, and called with others after the hit."""
    plans = [
        *itertools.product(("beside", "overlapping"), _RELATIONS),
        *(("apart", then) for then in ("one", "beside", "overlapping")),
        *(("one", then) for then in ("apart", "overlapping")),
        *(("interleaved", then) for then in ("interleaved and over", "beside")),
        *(("equal", then) for then in ("beside", "half over")),
    ]
    for (number, (then, later)), dynamic in itertools.product(enumerate(plans), (True, None)):
        if then == later:
            continue
        function, start, swapped = _CHANGES[number % 4], number % 3, number % 2 == 1

        def called(relation: str, size: int, start: int = start, swapped: bool = swapped) -> Call:
            return Call(functools.partial(_related, relation, size, start, swapped))

        last = 9 if dynamic else 6
        yield History(
            "guards",
            f"{function.__name__} {then}, {later}, from {start}, "
            f"swapped={swapped}, dynamic={dynamic}",
            function,
            (called(then, 6),),
            (called(then, 6), called(later, 6), called(then, last), called(later, last)),
            {"dynamic": dynamic},
            must_hit=True,
        )


# -- one input: where in its storage it begins

_SIZE = 24


def _input(offset: int, extent: int = _SIZE) -> tuple[Tensor]:
    return (_flat(extent)[offset : offset + 6],)


def _as_is(x: Tensor) -> Tensor:
    return x.as_strided((3,), (1,)) + 1


def _from(x: Tensor) -> Tensor:
    return torch.as_strided(x, (3,), (1,), 5) * 2


def _aten(x: Tensor) -> Tensor:
    return torch.ops.aten.as_strided.default(x, [2, 2], [2, 1], 4) + 1


def _copy(x: Tensor) -> Tensor:
    return torch.as_strided_copy(x, (3,), (1,), 5) + 1


def _of_a_view(x: Tensor) -> Tensor:
    return x[1:].as_strided((2,), (2,)) + x[:2]


def _of_a_view_from(x: Tensor) -> Tensor:
    return x.view(2, 3)[1].as_strided((2,), (1,), 6) + 1


def _changed(x: Tensor) -> Tensor:
    x.as_strided((2,), (1,), 5).mul_(7)
    return x + 1


def _changed_here(x: Tensor) -> Tensor:
    x[2:].as_strided((2,), (1,)).add_(7)
    return x * 2


def _scatter(x: Tensor) -> Tensor:
    return torch.as_strided_scatter(x, torch.zeros(2), (2,), (1,), 5) + 1


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    return y.as_strided_((2,), (1,), 1) + x.as_strided((2,), (1,), 4)


def _told(x: Tensor) -> Any:
    return x + x.storage_offset()


def _returned(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[2:], x.as_strided((2,), (1,), 5)


def _diagonal(x: Tensor) -> Tensor:
    return x.view(2, 3).diagonal() + x.unfold(0, 2, 2).sum()


_SEEING: tuple[Callable[[Tensor], Any], ...] = (
    _as_is, _from, _aten, _copy, _of_a_view, _of_a_view_from, _changed, _changed_here, _scatter,
    _in_place, _told, _returned, _diagonal,
)  # fmt: skip


def _plain(x: Tensor) -> Tensor:
    return x.sin() + 1


def _view(x: Tensor) -> Tensor:
    return x[1:].view(5, 1).t()


def _filled(x: Tensor) -> Tensor:
    return x.mul_(3)


def offsets() -> Iterator[History]:
    """What is cached for an input at one place in its storage, and called with it elsewhere."""
    for function in _SEEING:
        for before, after in ((0, 3), (4, 2), (2, 4)):
            yield _moved(function, before, after, None)
        yield _moved(function, 2, 4, True)
    for function in (_plain, _view, _filled, _diagonal):
        yield _moved(function, 0, 3, None, must_hit=True)
    for function in (_from, _aten, _changed):
        yield History(
            "offsets",
            f"{function.__name__} of less",
            function,
            (Call(functools.partial(_input, 1)),),
            (Call(functools.partial(_input, 1, 7)),),
            undefined=True,
        )


def _moved(
    function: Callable[[Tensor], Any],
    before: int,
    after: int,
    dynamic: bool | None,
    must_hit: bool = False,
) -> History:
    def calls(*starts: int) -> tuple[Call, ...]:
        return tuple(Call(functools.partial(_input, start)) for start in starts)

    return History(
        "offsets",
        f"{function.__name__} from {before} to {after}, dynamic={dynamic}",
        function,
        calls(before),
        calls(after, before, after),
        {"dynamic": dynamic},
        must_hit,
    )


# -- subclasses of tensors that hold one tensor twice, or each other's


def _pairs(letters: str, views: bool) -> tuple[Any, Any]:
    """Two wrappers of two tensors each: equal letters are one tensor, or views that are equal."""
    from torch.testing._internal.two_tensor import TwoTensor

    held = {letter: _flat(6) * (1 + ord(letter) - ord("a")) for letter in letters}
    tensors = [held[letter].view(6) if views else held[letter] for letter in letters]
    return TwoTensor(*tensors[:2]), TwoTensor(*tensors[2:])


_HELD = ("aabc", "abab", "abad", "abca", "aaaa", "abba", "abcc")


def subclasses() -> Iterator[History]:
    """Wrappers in one relation, hit by some in another."""
    for function, letters in itertools.product((_first_doubled, _both_changed), _HELD):
        plans = [(letters, "abcd", False), ("abcd", letters, False), ("abcd", letters, True)]
        for first, second, views in plans:
            yield History(
                "subclasses",
                f"{function.__name__} {first}, then {second}{' of views' if views else ''}",
                function,
                (Call(functools.partial(_pairs, first, views)),),
                tuple(Call(functools.partial(_pairs, each, views)) for each in (second, first)),
            )
