"""Find what programs register with Inductor: patterns, backends, choices. No graph names any.

There is a public function for each, and what it is given takes part in every compile. What torch
itself has registered says nothing: what counts is where the code of it lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from s3cache.graph._containers import Override
from s3cache.graph._distribution import origin_of
from s3cache.graph._identity import UnidentifiedError
from s3cache.graph._kernels import is_of_torch
from s3cache.graph._origin import is_foreign
from s3cache.torch_api import internals

__all__ = ["registered_overrides", "unused_kept"]

_PLAIN = (type(None), bool, int, float, str, bytes)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
_torchs: dict[int, object] = {}  # patterns of torch's, by id: hundreds, and they stay


def registered_overrides() -> Iterator[Override]:
    """Yield what others than torch registered, with the functions and classes it is made of.

    Raises:
        UnidentifiedError: a pattern has no text that another process has for the same.
    """
    yield from _patterns()
    for name, table in internals.registries_by_device():
        for device, each in list(table.items()):
            values = tuple(vars(each).values()) or (each,)
            if any(map(_is_others, values)):
                yield _registered(f"torch._inductor: {name} {device}", values)
    rules = [rule for rule in list(internals.fake_rules.get()) if any(map(_is_others, rule))]
    for number, rule in enumerate(rules):
        yield _registered(f"torch._subclasses: rules for fake tensors {number}", rule)
    handler = internals.choices_handler()
    if handler is not None and _is_others(handler):
        yield _registered("torch._inductor: choices", (handler,))


def unused_kept() -> list[str]:
    """Return the names of others' functions and operators with calls that stay, used or not."""
    found = []
    for each in list(internals.side_effectful.get()):
        if isinstance(each, internals.operator.get()):
            if not is_of_torch(each.name()):
                found.append(str(each))
        elif _is_others(each):
            found.append(internals.name_of(each))
    return sorted(found)


def _registered(place: str, values: tuple[object, ...]) -> Override:
    return Override(place, values, "was registered")


def _patterns() -> Iterator[Override]:
    """Yield patterns with their places among others: the first one that matches is applied."""
    for name, one in internals.pattern_passes():
        for (op, target), entries in list(one.patterns.items()):
            before = others = 0  # what torch adds later comes later
            for entry in list(entries):
                if id(entry) in _torchs:
                    before += 1
                    continue
                values = tuple(vars(entry).values())
                if not any(map(_is_others, values)):
                    _torchs[id(entry)] = entry
                    before += 1
                    continue
                text = repr(entry.pattern)
                if _ADDRESS.search(text):
                    raise UnidentifiedError(
                        f"a pattern in {name} has no name that another process has for it"
                    )
                known = str(target) if internals.is_operator(target) else internals.name_of(target)
                where = f"{op} {known} after {before} and {others} {text}"
                yield _registered(
                    f"torch._inductor.fx_passes.{name} {where}", (type(entry), *values)
                )
                others += 1


def _is_others(value: object) -> bool:
    if isinstance(value, _PLAIN) or internals.is_operator(value):
        return False
    if isinstance(value, (list, tuple)):
        return any(map(_is_others, value))
    if isinstance(value, type):
        return origin_of(value).kind not in ("torch", "python")
    return is_foreign(value) if callable(value) else _is_others(type(value))
