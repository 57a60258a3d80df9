"""Compare containers with what torch itself has in them: modules, classes, tables, operators.

Only in a container that has changed is anything asked about each object in it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, cast

import _s3cache_autoload
from s3cache.graph._identity import origin_of, unwrap_patch
from s3cache.graph._origin import (
    assigns,
    is_code,
    is_foreign,
    is_misplaced,
    is_of_torch,
    is_same_code,
    parts_of,
)
from s3cache.torch_api import internals
from s3cache.util.snapshot import ABSENT

LISTED = (*_s3cache_autoload.PLACES, *internals.LATER_PLACES)
_PYTHON = ("cmath", "math", "operator")
# What Dynamo adds to the module of a function that it compiled, such as `torch.cond`. Only the code
# that it made of that function calls it.
_DYNAMOS = ("__compiled_fn_", "__resume_at_")
_SCALARS: tuple[type, ...] = (str, bytes, int, bool, float, complex, type(None))
_MAX_DEPTH = 3


class Override(NamedTuple):
    """A value that replaces torch's own.

    Attributes:
        place: where it is.
        value: what is there now, :data:`ABSENT` if nothing, or the file that put it there if that
            is all that is known.
        how: it came there, for messages.
    """

    place: str
    value: object
    how: str = "was replaced"


#: Kinds of overrides that do not say what the new function or module does.
ALTERED, AS_A_WHOLE = "was altered", "was replaced as a whole"


def by_name(inside: Collection[object]) -> dict[object, object]:
    """Return what is in a container, by its key, its index, or itself."""
    if isinstance(inside, Mapping):
        return dict(inside)
    if isinstance(inside, list):
        return dict(enumerate(inside))
    if type(inside) is internals.ordered_set.get():
        inside = internals.inside_of_ordered_set(inside)  # it runs a line of Python for each
    return {each: each for each in list(inside)}


class Container:
    """A container of torch's, and what torch has in it.

    Attributes:
        first: what torch has in it, by name.
    """

    def __init__(self, place: str, inside: Collection[object]) -> None:
        self.place = place
        self.inside = inside
        self.first: dict[object, object] = {}

    def views(self) -> tuple[Collection[object], ...]:
        """Return what a snapshot compares."""
        if isinstance(self.inside, Mapping):
            return self.inside, self.inside.values()
        if type(self.inside) is internals.ordered_set.get():
            return (internals.inside_of_ordered_set(self.inside),)
        return (self.inside,)

    def start(self, first: dict[object, object] | None, *, trusted: bool) -> list[Override]:
        """Begin with what torch is known to have, with all that is there, or what looks like it."""
        if trusted and first is None:
            self.first = by_name(self.inside)
            return []
        if first is not None:
            self.first = first
            return self.compare()
        now = by_name(self.inside)
        others = [name for name, value in now.items() if self.is_foreign_at_first(name, value)]
        found = [self._override(name, unwrap_patch(now.pop(name))) for name in others]
        self.first = now
        return found

    def compare(self) -> list[Override]:
        """Return the values that now replace torch's own."""
        now, found = by_name(self.inside), []
        for name in {**self.first, **now}:
            old, new = (unwrap_patch(each.get(name, ABSENT)) for each in (self.first, now))
            is_same = old is new or _are_same_method(old, new)
            if not is_same and self.is_override(name, old, new):
                found.append(self._override(name, new))
        return found

    def _override(self, name: object, value: object) -> Override:
        return Override(f"{self.place}.{name}", value)

    def is_foreign_at_first(self, name: object, value: object) -> bool:
        return is_foreign(value)

    def is_override(self, name: object, old: object, new: object) -> bool:
        raise NotImplementedError


def _are_same_method(old: object, new: object) -> bool:
    """Return True if both are one static or class method, perhaps wrapped by a patch of ours."""
    if isinstance(old, staticmethod) and isinstance(new, staticmethod):
        return unwrap_patch(old.__func__) is unwrap_patch(new.__func__)
    if isinstance(old, classmethod) and isinstance(new, classmethod):
        return unwrap_patch(old.__func__) is unwrap_patch(new.__func__)
    return False


class Table(Container):
    """A table in which torch looks functions up; whatever is in it may be used."""

    def is_override(self, name: object, old: object, new: object) -> bool:
        if old is ABSENT:
            return is_foreign(new)
        if new is ABSENT:
            return is_code(old)
        return (is_code(old) or is_code(new)) and not is_same_code(old, new)


class Namespace(Container):
    """A module or a class."""

    inside: Mapping[str, object]

    def __init__(self, place: str, module: str, inside: Mapping[str, object]) -> None:
        super().__init__(place.replace(":", "."), inside)
        self.module = module
        self._listed_as = place if place in LISTED else ""
        self._makes_code = internals.makes_code(module)

    def views(self) -> tuple[Collection[object], ...]:
        return (self.inside.values(),)

    def is_foreign_at_first(self, name: object, value: object) -> bool:
        kind = type(value)
        if kind is types.FunctionType:
            function = cast("types.FunctionType", value)
            if function.__closure__ is None and function.__code__.co_filename in _known_files:
                # So it is for nine of ten.
                return bool(self._listed_as) and is_misplaced(value, self._listed_as, name)
        elif kind in _SCALARS:
            return False
        value = unwrap_patch(value)
        if is_foreign(value, name if self._listed_as else "", surveyed=True):
            return True
        if type(value) is types.FunctionType:
            _known_files.add(value.__code__.co_filename)
        return bool(self._listed_as) and is_misplaced(value, self._listed_as, name)

    def is_override(self, name: object, old: object, new: object) -> bool:
        if str(name).startswith(_DYNAMOS) or (self._listed_as and name in internals.NOT_COMPILED):
            return False
        if old is ABSENT:
            return self._is_override_if_added(str(name), new)
        if new is ABSENT:
            return bool(self._listed_as) and is_code(old)
        if self._is_code(old) and self._is_code(new):
            return not is_same_code(old, new)
        if is_foreign(new):
            return True
        if self.module in _PYTHON or (self._listed_as and (is_code(old) or is_code(new))):
            return True
        return self._makes_code and self._is_changed_value(str(name), old, new)

    def _is_code(self, value: object) -> bool:
        return is_code(value) or (self._makes_code and isinstance(value, types.ModuleType))

    def _is_override_if_added(self, name: str, new: object) -> bool:
        if self._listed_as and internals.is_shadowed(self._listed_as, name):
            return True
        if not self._makes_code:
            return False
        hides_bases = self.place != self.module and self._is_changed_value(name, ABSENT, new)
        return hides_bases or is_foreign(new)

    def _is_changed_value(self, name: str, old: object, new: object) -> bool:
        """Return True if a program has put another number, text or table there, and not torch."""
        kinds = _kinds_of_values()
        if name.startswith("__") or (type(old) not in kinds and type(new) not in kinds):
            return False
        return not is_same_value(old, new) and not self._is_assigned(name)

    def _is_assigned(self, name: str) -> bool:
        """Return True if torch's code assigns to what is called so: it is torch's own state."""
        members = vars(sys.modules[self.module])
        return any(assigns(each, name) for each in _codes_in(self.inside, members))


_known_files: set[str] = set()  # of functions that are torch's


def _codes_in(*namespaces: Mapping[str, object]) -> Iterator[types.CodeType]:
    """Yield the code of torch's functions in modules, in their classes, and of what they wrap."""
    for members in namespaces:
        for value in list(members.values()):
            if isinstance(value, type) and value.__module__ == members.get("__name__"):
                yield from _codes_in(vars(value))
            for part in parts_of(value) if is_code(value) else ():
                if type(part) is types.FunctionType and internals.has_code_of_torch(part):
                    yield part.__code__


class Constants(Container):
    """A dictionary, list or set of constants, functions and operators."""

    def _override(self, name: object, value: object) -> Override:
        return Override(f"{self.place}[{name}]", value)

    def is_foreign_at_first(self, name: object, value: object) -> bool:
        return False

    def compare(self) -> list[Override]:
        found = super().compare()
        there = [name for name in by_name(self.inside) if name in self.first]
        if type(self.inside) not in (list, set) and there != [n for n in self.first if n in there]:
            found.append(Override(f"{self.place}[in another order]", there))
        return found

    def is_override(self, name: object, old: object, new: object) -> bool:
        if is_same_value(old, new):
            return False
        if type(old) is int and type(new) is int and isinstance(self.inside, list):
            return False  # so Python counts in what cannot be assigned to
        if old is not ABSENT:
            return True
        # torch adds its own operators and functions as it works, and no new numbers.
        everything = (name, new, *self.first, *self.first.values())
        return is_foreign(new) or all(
            isinstance(each, _SCALARS) or internals.is_dtype(each) for each in everything
        )


def kinds_of_tables() -> tuple[type, ...]:
    return dict, list, set, internals.ordered_set.get()


def _kinds_of_values() -> tuple[type, ...]:
    return (*_SCALARS, tuple, frozenset, *kinds_of_tables())


def is_same_value(old: object, new: object, depth: int = 0) -> bool:
    """Return True if two constants are the same, whatever they claim to equal; 1 is not True."""
    if old is new:
        return True
    kind = type(old)
    if kind is not type(new) or kind not in _kinds_of_values() or depth > _MAX_DEPTH:
        return False
    if isinstance(old, _SCALARS):
        return old == new
    ours, theirs = (
        [*each, *each.values()] if isinstance(each, dict) else list(cast("Iterable[object]", each))
        for each in (old, new)
    )
    return len(ours) == len(theirs) and all(
        is_same_value(one, other, depth + 1) for one, other in zip(ours, theirs, strict=True)
    )


def is_constant(value: object) -> bool:
    return (
        type(value) in _kinds_of_values()
        or internals.is_dtype(value)
        or internals.is_operator(value)
        or isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))
    )


class Operators(Container):
    """A place in which torch keeps operators by name: a namespace of them, or an operator's own.

    They come there as they are asked for. Only operators are looked at.
    """

    inside: dict[str, object]

    def views(self) -> tuple[Collection[object], ...]:
        return (self.inside.values(),)

    def start(self, first: dict[object, object] | None, *, trusted: bool) -> list[Override]:
        return self.compare()

    def compare(self) -> list[Override]:
        found = []
        for name in [*self.first.keys() - self.inside.keys(), *list(self.inside)]:
            old, new = self.first.get(name, ABSENT), self.inside.get(cast("str", name), ABSENT)
            if old is new:
                continue
            whole = internals.full_name_there(self.inside, str(name))
            is_at_home = _is_operator(new) and internals.full_name(new) == whole
            if old is not ABSENT and is_torchs_operator(old):
                found.append(self._override(whole, new))
            elif is_at_home:
                self.first[name] = new
            elif old is not ABSENT:
                del self.first[name]
            elif not _is_operator(new) and not self._is_place_of_one(str(name)):
                continue
            elif is_torchs_operator(whole):
                found.append(self._override(whole, new))
        return found

    def _is_place_of_one(self, name: str) -> bool:
        if "_qualified_op_name" in self.inside:
            return internals.is_place_of_overload(self.inside, name)
        return "name" in self.inside and internals.is_place_of_packet(self.inside, name)

    def _override(self, name: object, value: object) -> Override:
        return Override(f"torch.ops.{name}".replace("::", "."), value)


is_kind_of_operator: Callable[[type], bool] = internals.is_kind_of_operator
_is_kind_of_packet: Callable[[type], bool] = internals.is_kind_of_packet
_is_kind_of_namespace: Callable[[type], bool] = internals.is_kind_of_namespace


def _is_operator(value: object) -> bool:
    kind = type(value)
    return is_kind_of_operator(kind) or _is_kind_of_packet(kind) or _is_kind_of_namespace(kind)


def is_torchs_operator(value: object) -> bool:
    """Return True if torch defines it; asked of names, too."""
    if internals.is_higher_order(value):
        return origin_of(type(value)).kind == "torch"
    if _is_kind_of_namespace(type(value)):
        packets = [each for each in vars(value).values() if _is_kind_of_packet(type(each))]
        return any(map(is_torchs_operator, packets))
    name = value if isinstance(value, str) else internals.full_name(value)
    return "::" not in name or is_of_torch(name)
