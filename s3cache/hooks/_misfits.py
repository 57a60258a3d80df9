"""Say why an entry under the right key did not fit: for people, and asked on a miss only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from s3cache.graph import storage_offsets
from s3cache.hooks._conditions import Conditions
from s3cache.torch_api import internals

# How torch names the sizes that are inputs, in the guards of its entries, by number.
_NUMBERED = re.compile(r"L\['t(\d+)'\]")
# A variable of the function that is compiled.
_LOCAL = re.compile(r"L\['(\w+)'\]")


def failing_guards(expression: str, inputs: Sequence[object]) -> list[str]:
    """Return which of torch's guards on sizes do not hold for ``inputs``, with these sizes.

    Args:
        expression: all of them, joined by ``and``.
    """
    sizes = internals.sizes_among(inputs)
    names = [
        _as_written(internals.name_of_size(size) or f"size {i}") for i, size in enumerate(sizes)
    ]
    values = [internals.value_of_size(size) for size in sizes]
    failures = []
    tree = ast.parse(expression.strip(), mode="eval").body
    guards = (
        tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    )
    for guard in map(ast.unparse, guards):
        if not internals.holds_of_sizes(guard, sizes, values):
            numbers = sorted({int(number) for number in _NUMBERED.findall(guard)})
            text = _NUMBERED.sub(lambda match: names[int(match[1])], guard)
            failures.append(_failure(text, {names[number]: values[number] for number in numbers}))
    return failures


def failing_conditions(
    conditions: Conditions, inputs: Sequence[object], sources: Sequence[object]
) -> list[str]:
    """Return which conditions of an entry do not hold for ``inputs``, in the order of checks.

    Args:
        sources: where Dynamo takes each input from.
    """
    return [
        *_failing_places(conditions["places"], inputs, sources),
        *_failing_sizes(conditions["sizes"]),
        *_failing_overlaps(conditions["guards"], inputs, sources),
    ]


def _failure(guard: str, values: Mapping[str, object]) -> str:
    here = ", ".join(f"{name} is {value}" for name, value in values.items())
    return f"guard `{guard}` does not hold{f': {here}' if here else ''}"


def _as_written(source: str) -> str:
    """Return ``L['x'].size()[0]`` as the compiled function would have it: ``x.size()[0]``."""
    return _LOCAL.sub(r"\1", source)


def _input_name(number: int, sources: Sequence[object]) -> str:
    name = internals.name_of_source(sources[number]) if number < len(sources) else None
    return f"input {number}" + (f" ({_as_written(name)})" if name else "")


def _failing_places(
    expected: str | None, inputs: Sequence[object], sources: Sequence[object]
) -> Iterator[str]:
    """Compare ``2@8/48``: where input 2 begins, in elements, and its storage's size in bytes."""
    if expected is None:
        return
    before, now = (
        dict(each.split("@") for each in text.split())
        for text in (expected, storage_offsets(inputs))
    )
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            number = name.partition(".")[0]
            called = _input_name(int(number), sources) if number.isdigit() else f"input {name}"
            there, here = _begins(before.get(name)), _begins(now.get(name))
            yield f"{called} begins {there} in the entry, {here} here"


def _begins(place: str | None) -> str:
    if place is None:
        return "in no storage"
    start, _, size = place.partition("/")
    return f"at element {start} of a storage of {size} bytes"


def _failing_sizes(sizes: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[str]:
    context = internals.current_tracing_context.get()()
    for expression, named in sizes:
        text = re.sub(r"\w+", lambda match: _as_written(named.get(match[0], match[0])), expression)  # noqa: B023
        if context is None:
            yield _failure(text, {})
        elif not internals.are_named(context, named):
            yield f"guard `{text}` is on sizes that are others here, or not dynamic"
        elif not internals.size_guard_holds(context, expression, named):
            values = {
                _as_written(source): internals.value_of_symbol(context, symbol)
                for symbol, source in named.items()
            }
            yield _failure(text, values)


def _failing_overlaps(
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
        one, other = (", ".join(_input_name(i, sources) for i in of) for of in (some, others))
        if kind == "DuplicateInputs":
            yield f"{one} and {other} are one tensor in the entry, and two here"
        elif one and other:
            yield f"{one} overlap in the entry, and not with {other}; here it is otherwise"
        elif one:
            yield f"{one} overlap in memory in the entry; here they do not"
        else:
            yield f"{other} do not overlap in memory in the entry; here they do"
