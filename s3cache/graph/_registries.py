"""What programs register with Inductor: patterns, backends, choices. No graph names any of it.

There is a public function for each, and what it is given takes part in every compile. What torch
has registered itself says nothing: what counts is where the code of it lies.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, NamedTuple, cast

from s3cache.graph._distribution import origin_of
from s3cache.graph._identity import UnidentifiedError
from s3cache.graph._registered import is_of_torch
from s3cache.graph._whose import is_foreign
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import PatternEntry, PatternPass

__all__ = ["Registered", "registered_others", "unused_kept"]

_PLAIN = (type(None), bool, int, float, str, bytes)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
# Patterns of torch's, which are hundreds once it compiles, and stay.
_torchs: dict[int, object] = {}


class Registered(NamedTuple):
    """Where, under what, and the functions and classes that it is made of.

    Attributes:
        place: the table, such as a pass with patterns.
        what: the key in it.
        values: what was registered.
    """

    place: str
    what: str
    values: tuple[object, ...]


def registered_others() -> Iterator[Registered]:
    """Yield each thing that is registered, and not torch's.

    Raises:
        UnidentifiedError: a pattern has no text that another process has for the same.
    """
    yield from _patterns()
    for name, table in internals.registries_by_device():
        for device, each in list(table.items()):
            values = tuple(vars(each).values()) or (each,)
            if any(map(_is_users, values)):
                yield Registered(f"torch._inductor: {name}", device, values)
    rules = [rule for rule in list(internals.fake_rules.get()) if any(map(_is_users, rule))]
    for number, rule in enumerate(rules):
        yield Registered("torch._subclasses: rules for fake tensors", str(number), rule)
    handler = internals.choices_handler()
    if handler is not None and _is_users(handler):
        yield Registered("torch._inductor: choices", "", (handler,))


def unused_kept() -> list[str]:
    """Return the names of others' functions and operators with calls that stay, used or not."""
    found = []
    for each in list(internals.side_effectful.get()):
        if isinstance(each, internals.operator.get()):
            if not is_of_torch(each.name()):
                found.append(str(each))
        elif _is_users(each):
            found.append(internals.name_of(each))
    return sorted(found)


_looked: tuple[list[PatternEntry], list[Registered]] = ([], [])


def _patterns() -> list[Registered]:
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
) -> Iterator[Registered]:
    for name, one in passes:
        for (op, target), entries in list(one.patterns.items()):
            before = users = 0  # what torch adds later comes later
            for entry in list(entries):
                values = tuple(vars(entry).values())
                if id(entry) not in _torchs and any(map(_is_users, values)):
                    at = f"{op} {_name_of(target)} after {before} and {users}"
                    what = f"{at} {_pattern(name, entry)}"
                    place = f"torch._inductor.fx_passes.{name}"
                    yield Registered(place, what, (type(entry), *values))
                    users += 1
                else:
                    _torchs[id(entry)] = entry
                    before += 1


def _name_of(target: object) -> str:
    return str(target) if internals.is_operator(target) else internals.name_of(target)


def _pattern(place: str, entry: object) -> str:
    text = repr(getattr(entry, "pattern", None))
    if _ADDRESS.search(text):
        raise UnidentifiedError(f"a pattern in {place} has no name that another process has for it")
    return text


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
        return origin_of(value).kind not in ("torch", "python")
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
    if origin_of(kind).kind not in ("torch", "python"):
        return False
    _classes[kind] = None
    return True
