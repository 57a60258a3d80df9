"""What programs register with Inductor: patterns, backends, choices. No graph names any of it.

There is a public function for each, and what it is given takes part in every compile. What torch
has registered itself says nothing, whenever it did that: what counts is whose code it is and, where
that was watched, who registered it.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, NamedTuple, cast

from s3cache.graph._code import UntoldError, told
from s3cache.graph._definitions import parts_of
from s3cache.graph._homes import home_of
from s3cache.graph._registered import is_of_torch
from s3cache.graph._whose import is_foreign, text_of, whole
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import PatternEntry, PatternPass

__all__ = ["forget_registered", "record_registered", "registered_lines"]

_PLAIN = (type(None), bool, int, float, str, bytes)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
# Patterns of torch's, which are hundreds once it compiles, and stay.
_torchs: dict[int, object] = {}
# Registered by others than torch, whosever code it is; by identity.
_others: dict[int, object] = {}


def record_registered(entry: object) -> None:
    """Somebody else than torch registers ``entry``, which may be made of what torch has."""
    _others[id(entry)] = entry


def forget_registered() -> None:
    """Nobody records any more what is registered."""
    _others.clear()


def registered_lines(vouched: Callable[[object], str | None]) -> Iterator[str]:
    """A line for each thing that others than torch have registered.

    Raises:
        UntoldError: one of them cannot be told; says which.
    """
    for place, what, entry, values in _registered():
        if id(entry) in _others or any(map(_is_users, values)):
            yield f"{place} {what}: {_text(place, values, vouched)}"
    named = [f"{name} {_text(name, [each], vouched)}" for name, each in _kept()]
    if named:
        yield f"not removed though unused: {' '.join(sorted(named))}"


class _Registered(NamedTuple):
    """Where, under what, what, and the functions and classes that it is made of."""

    place: str
    what: str
    entry: object
    values: tuple[object, ...]


def _registered() -> Iterator[_Registered]:
    yield from _patterns()
    for name, table in internals.registries_by_device():
        for device, each in list(table.items()):
            yield _Registered(name, device, each, tuple(vars(each).values()) or (each,))
    rules = [rule for rule in list(internals.fake_rules.get()) if any(map(_is_users, rule))]
    for number, rule in enumerate(rules):
        yield _Registered("fake tensors", str(number), rule, rule)
    handler = internals.choices_handler()
    if handler is not None:
        yield _Registered("choices", "", handler, (handler,))


_looked: tuple[list[PatternEntry], list[_Registered]] = ([], [])


def _patterns() -> list[_Registered]:
    """Those of users'. Most looks find what the last one did."""
    global _looked
    passes = internals.pattern_passes()
    lists = [each for _, one in passes for each in list(one.patterns.values())]
    now = list(itertools.chain.from_iterable(lists))
    if not internals.are_identical(now, _looked[0]):
        _looked = now, list(_users_patterns(passes))
    return _looked[1]


def _users_patterns(
    passes: list[tuple[str, PatternPass]],
) -> Iterator[_Registered]:
    for name, one in passes:
        for (op, target), entries in list(one.patterns.items()):
            before = users = 0  # what torch adds later comes later
            for entry in list(entries):
                values = tuple(vars(entry).values())
                if id(entry) in _others or (
                    id(entry) not in _torchs and any(map(_is_users, values))
                ):
                    at = f"{op} {_name_of(target)} after {before} and {users}"
                    what = f"{at} {_pattern(name, entry)}"
                    yield _Registered(name, what, entry, (type(entry), *values))
                    users += 1
                else:
                    _torchs[id(entry)] = entry
                    before += 1


def _name_of(target: object) -> str:
    return str(target) if internals.is_operator(target) else internals.name_of(target)


def _pattern(place: str, entry: object) -> str:
    text = repr(getattr(entry, "pattern", None))
    if _ADDRESS.search(text):
        raise UntoldError(f"a pattern in {place} has no name that another process has for it")
    return text


def _kept() -> Iterator[tuple[str, object]]:
    """Users' functions and operators whose calls stay in graphs, used or not."""
    for each in list(internals.side_effectful.get()):
        if isinstance(each, internals.operator.get()):
            if not is_of_torch(each.name()):
                yield str(each), None
        elif _is_users(each):
            yield internals.name_of(each), each


def _is_users(value: object) -> bool:
    if isinstance(value, _PLAIN) or internals.is_operator(value):
        return False
    if isinstance(value, type):
        return not _is_torchs_class(value)
    if _is_plainly_torchs(value):
        return False
    if isinstance(value, (list, tuple)):
        return any(map(_is_users, value))
    if isinstance(value, BuiltinFunctionType):
        return home_of(value).kind not in ("torch", "python")
    if callable(value):
        return is_foreign(value, "", but=_generated())
    return _is_users(type(value))


@functools.cache
def _generated() -> frozenset[object]:
    return frozenset(internals.generated_operations())


def _is_plainly_torchs(value: object) -> bool:
    """As most are: a function that wraps nothing."""
    is_simple = isinstance(value, FunctionType) and value.__closure__ is None
    return is_simple and internals.has_code_of_torch(cast("FunctionType", value))


_classes: dict[type, None] = {}


def _is_torchs_class(kind: type) -> bool:
    if kind in _classes:
        return True
    if home_of(kind).kind not in ("torch", "python"):
        return False
    _classes[kind] = None
    return True


def _text(
    place: str, values: list[object] | tuple[object, ...], vouched: Callable[[object], str | None]
) -> str:
    words = []
    for value in values:
        version = vouched(value)
        try:
            if version is not None:
                words.append(f"version {version}")
            elif _is_users(value):
                words.append(told(_whole(value), parts_of(vouched)))
            elif callable(value):
                words.append(text_of(value))
        except UntoldError as exc:
            raise UntoldError(f"what is registered in {place} {exc}") from exc
    return " ".join(words)


def _whole(value: object) -> list[object]:
    return [value, *whole(value if isinstance(value, type) else type(value))[1:]]
