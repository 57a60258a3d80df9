"""Inputs that share a storage, or start inside one, in later calls of code from a hit."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.equal.programs import Call, Pair, calling


def _flat(size: int) -> Tensor:
    return torch.arange(1.0, 1 + size)


# -- two inputs: their positions, and changes of them

# For inputs in one storage: the offset of the second from the first, in halves of an input and in
# elements, and the step.
_BEHIND = {
    "beside": (4, 0, 1), "touching": (2, 0, 1), "overlapping": (0, 1, 1), "half over": (1, 0, 1),
    "equal": (0, 0, 1), "interleaved": (0, 1, 2), "interleaved and over": (0, 2, 2),
}  # fmt: skip
_RELATIONS = ("apart", "one", *_BEHIND)


def _first_doubled(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return a + b


def _both_changed(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    b.add_(1)
    return a * b


def _part_changed(a: Tensor, b: Tensor) -> Tensor:
    a[1:].add_(b[:-1])
    return a.cos() + b


def _view_changed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a.view(-1)[::2].neg_()
    return b.flip(0), a


def _only_read(a: Tensor, b: Tensor) -> Tensor:
    return a * b + a


def _without_grad(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        a.mul_(2)
    return a + b


def _broken_off(a: Tensor, b: Tensor) -> Tensor:
    """Two graphs: the first one changes an input of the second one."""
    a.mul_(2)
    torch._dynamo.graph_break()
    b.add_(1)
    return a - b


_CHANGES = (
    _first_doubled, _both_changed, _part_changed, _view_changed, _only_read, _without_grad,
    _broken_off,
)  # fmt: skip
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)


def _related(relation: str, n: int, start: int, swapped: bool, dtype: torch.dtype) -> Any:
    """Return two inputs of ``n`` elements; the first one in their storage begins at ``start``."""
    if relation == "apart":
        pair = _flat(n).to(dtype), (_flat(n) * 3).to(dtype)
    elif relation == "one":
        pair = (one := _flat(n).to(dtype)), one
    else:
        halves, more, step = _BEHIND[relation]
        flat = _flat(5 * n).to(dtype)
        first, second = flat[start:], flat[start + halves * n // 2 + more :]
        pair = first[: n * step : step], second[: n * step : step]
    return pair[::-1] if swapped else pair


def _call(make: Any, *args: Any, **how: Any) -> Call:
    return Call(functools.partial(make, *args), **how)


def guards() -> Iterator[Pair]:
    """Yield each relation after each other one, with several changes, and sizes that may change.

    Pairs with the same first program share what it saved.
    """
    ways = itertools.product(_RELATIONS, range(4), (None, True))
    for number, (first, turn, dynamic) in enumerate(ways):
        function = _CHANGES[(number // 2 + 3 * turn) % len(_CHANGES)]
        dtype, start, swapped = _DTYPES[turn], (number // 2) % 3, number % 4 > 1
        make = functools.partial(_related, start=start, swapped=swapped, dtype=dtype)
        how = f"{function.__name__} {str(dtype)[6:]} from {start}, swapped={swapped}, {dynamic=}"
        for later in _RELATIONS:
            calls = itertools.product((6, 9 if dynamic else 6), (first, later))
            yield calling(
                "guards",
                f"{how}: {first}, {later}",
                function,
                (_call(make, first, 6),),
                tuple(_call(make, relation, size) for size, relation in calls),
                {"dynamic": dynamic},
                must_hit=True,
                native=turn == 0 and first in ("beside", "overlapping"),
                filled=f"{how}: {first}",
            )


def _three_changed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a.mul_(2)
    c.add_(b)
    return a + b * c


# Three inputs: equal letters are one tensor, a digit is a view that begins there in one storage.
_TRIPLES = (
    "abc", "aab", "aba", "abb", "aaa", "012", "006", "060", "066", "036", "a03", "0a3", "03a",
)  # fmt: skip


def _triple(letters: str, requires_grad: bool = False) -> tuple[Tensor, ...]:
    flat = _flat(24)
    held = {letter: _flat(6) * (2 + ord(letter) - 97) for letter in "abc"}
    for each in held.values():
        each.requires_grad_(requires_grad)
    return tuple(flat[int(each) * 2 :][:6] if each.isdigit() else held[each] for each in letters)


def _of_leaves(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a.sin() * b + c * a


def triples() -> Iterator[Pair]:
    """Yield each relation of three inputs after each other one, with changes or gradients."""
    for function, relations, backward in (
        (_three_changed, _TRIPLES, None),
        (_of_leaves, _TRIPLES[:5], contextlib.nullcontext),
    ):
        ways = itertools.product((None, True), relations, relations)
        for dynamic, first, later in ways:
            of_leaves = backward is not None
            calls = [_call(_triple, each, of_leaves, backward=backward) for each in (first, later)]
            yield calling(
                "guards",
                f"{function.__name__} {first}, {later}, {dynamic=}",
                function,
                (calls[0],),
                (*calls, calls[0]),
                {"dynamic": dynamic},
                must_hit=True,
                native=False,
                filled=f"{function.__name__} {first} {dynamic}",
            )


# -- one input: its offset in its storage


# Programs that see the offset of an input in its storage; those of _WRITING get no leaf.
_WRITING: dict[str, Callable[[Tensor], Any]] = {
    "changed": lambda x: (x.as_strided((2,), (1,), 5).mul_(7), x + 1)[1],
    "changed here": lambda x: (x[2:].as_strided((2,), (1,)).add_(7), x * 2)[1],
    "in place": lambda x: x.clone().as_strided_((2,), (1,), 1) + x.as_strided((2,), (1,), 4),
}
_SEEING: dict[str, Callable[[Tensor], Any]] = {
    "as is": lambda x: x.as_strided((3,), (1,)) + 1,
    "from": lambda x: torch.as_strided(x, (3,), (1,), 5) * 2,
    "aten": lambda x: torch.ops.aten.as_strided.default(x, [2, 2], [2, 1], 4) + 1,
    "copy": lambda x: torch.as_strided_copy(x, (3,), (1,), 5) + 1,
    "of a view": lambda x: x[1:].as_strided((2,), (2,)) + x[:2],
    "of a view from": lambda x: x.view(2, 3)[1].as_strided((2,), (1,), 6) + 1,
    "scatter": lambda x: torch.as_strided_scatter(x, torch.zeros(2), (2,), (1,), 5) + 1,
    **_WRITING,
    "seen": lambda x: x + x.storage_offset(),
    "parts returned": lambda x: (x[2:], x.as_strided((2,), (1,), 5)),
    "with grad": lambda x: x.as_strided((3,), (1,), 5).sin() * 2,
}
# Programs that do not see it.
_BLIND: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda x: x.sin() + 1,
    "view": lambda x: x[1:].view(5, 1).t(),
    "filled": lambda x: x.mul_(3),
    "diagonal": lambda x: x.view(2, 3).diagonal() + x.unfold(0, 2, 2).sum(),
}
_PLACES = (0, 1, 2, 4, 5)


def _slot(offset: int, kind: str) -> tuple[Any, ...]:
    """Return an input of six numbers in a storage of 24."""
    x = _flat(24)[offset : offset + 6]
    if kind == "parameter":
        return (torch.nn.Parameter(x),)
    return (x.requires_grad_() if kind == "leaf" else x,)


def offsets() -> Iterator[Pair]:
    """Yield moves from each offset to others: of tensors, leaves and parameters, of any sizes.

    Programs that do not see the offset must hit.
    """
    for name, function in _BLIND.items():
        calls = tuple(_call(_slot, start, "tensor") for start in (3, 0))
        name = f"{name} sees no place"
        yield calling("offsets", name, function, calls[1:], calls, must_hit=True)
    kinds = itertools.cycle(("tensor", "leaf", "parameter"))
    for (name, function), dynamic in itertools.product(_SEEING.items(), (None, True)):
        for number, before in enumerate(_PLACES):
            kind = "tensor" if name in _WRITING else "leaf" if name == "with grad" else next(kinds)
            backward = contextlib.nullcontext if kind != "tensor" else None
            how = f"{name} of a {kind} from {before}, {dynamic=}"
            first = _call(_slot, before, kind, backward=backward)
            for step in (1, 2, 3):
                after = _PLACES[(number + step) % len(_PLACES)]
                moved = _call(_slot, after, kind, backward=backward)
                yield calling(
                    "offsets",
                    f"{how} to {after}",
                    function,
                    (first,),
                    (moved, first, moved),
                    {"dynamic": dynamic},
                    native=before == 0 and not dynamic,
                    filled=how,
                )


# -- tensor subclasses that hold one tensor twice, or share tensors


def _pairs(letters: str, views: bool, mixed: bool) -> tuple[Any, Any]:
    """Return two wrappers of two tensors; equal letters are one tensor, or equal views of it.

    If they are mixed, the second is a plain tensor, which the wrapper may also hold.
    """
    from torch.testing._internal.two_tensor import TwoTensor

    held = {letter: _flat(6) * (1 + ord(letter) - ord("a")) for letter in letters}
    tensors = [held[letter].view(6) if views else held[letter] for letter in letters]
    return TwoTensor(*tensors[:2]), tensors[2] if mixed else TwoTensor(*tensors[2:])


def _second_changed(a: Tensor, b: Tensor) -> Tensor:
    b.add_(a)
    return b * 2


_HELD = (
    "aabc", "abab", "abad", "abca", "aaaa", "abba", "abcc", "abac", "abbc", "abcb", "aaab", "abaa",
    "abbb", "aabb", "abcd",
)  # fmt: skip


def subclasses() -> Iterator[Pair]:
    """Yield each relation followed by some others, also with plain tensors."""
    functions = (_first_doubled, _both_changed, _only_read, _second_changed)
    ways = itertools.product(enumerate(functions), (False, True), enumerate(_HELD), (1, 4))
    for (number, function), mixed, (place, first), step in ways:
        second = _HELD[(place + number + step) % len(_HELD)]
        if first == second:
            continue
        views, dynamic = (place + step) % 2 == 1, True if place % 3 == 0 else None
        how = f"{mixed=} {function.__name__} {first}, {views=}, {dynamic=}"
        yield calling(
            "subclasses",
            f"{how}, then {second}",
            function,
            (_call(_pairs, first, views, mixed),),
            tuple(_call(_pairs, each, views, mixed) for each in (second, first)),
            {"dynamic": dynamic},
            native=not mixed and number < 2 and place < 7,
            filled=how,
        )
