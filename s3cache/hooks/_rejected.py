"""In which words an entry did not fit, for people: asked once it is clear that it does not.

What is found here decides nothing, and costs a hit nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from s3cache.graph import places
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.hooks._conditions import Conditions

__all__ = ["failing_conditions", "failing_guards"]

# How torch names the sizes that are inputs, in the guards of its entries, by number.
_NUMBERED = re.compile(r"L\['t(\d+)'\]")
# A variable of the function that is compiled.
_LOCAL = re.compile(r"L\['(\w+)'\]")


def failing_guards(expression: str, inputs: Sequence[object]) -> list[str]:
    """Which of torch's guards on sizes do not hold of ``inputs``, with the sizes that there are.

    Args:
        expression: all of them, joined by ``and``.
    """
    sizes = internals.sizes_among(inputs)
    names = [_plain(internals.name_of_size(size) or f"size {i}") for i, size in enumerate(sizes)]
    values = [internals.value_of_size(size) for size in sizes]
    found = []
    for guard in _conjuncts(expression):
        if not internals.holds_of_sizes(guard, sizes, values):
            numbers = sorted({int(number) for number in _NUMBERED.findall(guard)})
            words = _NUMBERED.sub(lambda match: names[int(match[1])], guard)
            found.append(_said(words, {names[number]: values[number] for number in numbers}))
    return found


def failing_conditions(
    conditions: Conditions, inputs: Sequence[object], sources: Sequence[object]
) -> list[str]:
    """Which conditions of an entry do not hold of ``inputs``, in the order they are asked for.

    Args:
        sources: where Dynamo takes each input from.
    """
    return [
        *_places(conditions["places"], inputs, sources),
        *_sizes(conditions["sizes"]),
        *_memory(conditions["guards"], inputs, sources),
    ]


def _conjuncts(expression: str) -> list[str]:
    tree = ast.parse(expression.strip(), mode="eval").body
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    return [ast.unparse(part) for part in parts]


def _said(guard: str, values: Mapping[str, object]) -> str:
    here = ", ".join(f"{name} is {value}" for name, value in values.items())
    return f"guard `{guard}` does not hold{f': {here}' if here else ''}"


def _plain(source: str) -> str:
    """``L['x'].size()[0]`` as the function that is compiled would have it: ``x.size()[0]``."""
    return _LOCAL.sub(r"\1", source)


def _called(number: int, sources: Sequence[object]) -> str:
    name = internals.name_of_source(sources[number]) if number < len(sources) else None
    return f"input {number}" + (f" ({_plain(name)})" if name else "")


def _places(
    expected: str | None, inputs: Sequence[object], sources: Sequence[object]
) -> Iterator[str]:
    """Of ``2@8/48``: where input 2 begins, in elements, and how large its storage is, in bytes."""
    if expected is None:
        return
    before, now = (
        dict(each.split("@") for each in of.split()) for of in (expected, places(inputs))
    )
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            number = name.partition(".")[0]
            called = _called(int(number), sources) if number.isdigit() else f"input {name}"
            there, here = _begins(before.get(name)), _begins(now.get(name))
            yield f"{called} begins {there} in the entry, {here} here"


def _begins(place: str | None) -> str:
    if place is None:
        return "in no storage"
    start, _, size = place.partition("/")
    return f"at element {start} of a storage of {size} bytes"


def _sizes(sizes: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    context = internals.current_tracing_context.get()()
    for expression, named in sizes:
        words = re.sub(r"\w+", lambda match: _plain(named.get(match[0], match[0])), expression)  # noqa: B023
        if context is None:
            yield _said(words, {})
        elif not internals.are_named(context, named):
            yield f"guard `{words}` is on sizes that are others here, or not dynamic"
        elif not internals.size_guard_holds(context, expression, named):
            values = {
                _plain(source): internals.value_of_symbol(context, symbol)
                for symbol, source in named.items()
            }
            yield _said(words, values)


def _memory(
    guards: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    inputs: Sequence[object],
    sources: Sequence[object],
) -> Iterator[str]:
    context = internals.current_tracing_context.get()()
    for kind, some, others in guards:
        if context is not None and internals.guard_holds(
            context, kind, [inputs[i] for i in some], [inputs[i] for i in others]
        ):
            continue
        one, other = (", ".join(_called(i, sources) for i in of) for of in (some, others))
        if kind == "DuplicateInputs":
            yield f"{one} and {other} are one tensor in the entry, and two here"
        elif one and other:
            yield f"{one} overlap in the entry, and not with {other}; here it is otherwise"
        elif one:
            yield f"{one} overlap in memory in the entry; here they do not"
        else:
            yield f"{other} do not overlap in memory in the entry; here they do"
