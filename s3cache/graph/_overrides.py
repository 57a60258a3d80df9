"""What of torch is not as ``import torch`` made it: functions and tables that compiling reads.

Programs replace functions of torch: by assignment, or by registering a decomposition or a lowering.
Many of those run while a graph is traced or lowered, which names none of them: a graph calls
``layer_norm`` of ``torch.nn.functional``, and that calls whatever ``torch.layer_norm`` is by then.

Namespaces and tables are held against copies of them from the end of ``import torch``; what was
imported later, or where there is no such copy, against itself at the first look, less what is not
torch's. Whether something is torch's is decided by where its code lies, and by nothing that it says
of itself. Any replaced entry is a part of every key: nobody knows which graphs come by it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, TypeAlias

import _s3cache_autoload
from s3cache._importing import is_being_imported, when_imported
from s3cache.graph._altered import altered_functions, remember_insides, stand_in_for
from s3cache.graph._code import UntoldError, written_by
from s3cache.graph._homes import name_of
from s3cache.graph._members import Member, await_members, replaced_members
from s3cache.graph._placed import is_misplaced
from s3cache.graph._registered import is_of_torch, replaced_kernels
from s3cache.graph._registries import registered_lines
from s3cache.graph._stable import Component
from s3cache.graph._tables import Entry, remember_tables, replaced_entries
from s3cache.graph._whose import (
    ABSENT,
    are_alike,
    foreign_parts,
    is_code,
    is_foreign,
    shown,
    text_of,
)
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import TracingContext

__all__ = ["overrides", "remember_pristine"]


def remember_pristine(*, early: bool) -> Callable[[], None]:
    """Take note of what torch has by now, and of the rest right after it is imported.

    The sooner the better: what is replaced later is known for certain to be replaced. What has been
    noted before stays.

    Args:
        early: whether torch is imported at this moment, so that nobody has changed anything yet.

    Returns:
        A function that takes back what is still to come.
    """
    waiting: list[Callable[[], None]] = []
    if internals.TORCH in sys.modules:
        waiting = _begin()
        remember_tables(early=early)
        if internals.COMPILER not in sys.modules:
            waiting.append(when_imported(internals.COMPILER, _remember_operators))

    def withdraw() -> None:
        for take_back in waiting:
            take_back()

    return withdraw


def _remember_operators() -> None:
    """The compiler brings most of them along, and nobody has touched those then."""
    with suppress(Exception):  # the first key asks again, where it can be said what fails
        remember_tables(early=False)
        replaced_kernels()
        deque(_foreign_fakes(), maxlen=0)


def _begin() -> list[Callable[[], None]]:
    later: dict[str, list[_Watched]] = {}
    for watched in _watched():
        if is_being_imported(watched.module):
            # By what has led to the compiler's import. What it will have is not there yet: the
            # first look surveys it.
            continue
        if watched.module in sys.modules:
            watched.survey()
        else:
            later.setdefault(watched.module, []).append(watched)
    waiting = [when_imported(name, partial(_note_all, each)) for name, each in later.items()]
    return [*waiting, *await_members()]


def _note_all(watched: Sequence[_Watched]) -> None:
    for each in watched:
        each.note()


def overrides(
    vouched: Callable[[object], str | None] = lambda _: None,
    *,
    again: bool = True,
    traced: bool = False,
) -> Component | None:
    """A component for all that is not as torch made it; ``None`` if everything is.

    Args:
        again: whether to look into functions and operators even if that was done in this compile.
        vouched: the version of a function that the user vouched for.
        traced: whether the key has what was traced. What counts or times its calls is then named
            by its source; else its graphs are refused once what it counts has changed.

    Raises:
        UntoldError: something was replaced by what cannot be told; says what and where.
    """
    text = _Texts(vouched, traced=traced)
    lines = [
        text.line(f"{watched.place}.{shown(name)}", "is not torch's", value)
        for watched in _watched()
        for name, value in watched.replaced().items()
    ]
    lines += _stale(text)
    lines += _kernels(text)
    lines += _insides(text, again=again)
    lines += registered_lines(vouched)
    return Component.of_text("\n".join(sorted(lines))) if lines else None


_seen: dict[str, tuple[object, str]] = {}  # of what was replaced, by where it is
_writing: set[str] = set()  # ... and has changed what it keeps since


class _Texts:
    """What was replaced, in words."""

    def __init__(self, vouched: Callable[[object], str | None], *, traced: bool) -> None:
        self.vouched = vouched
        self._traced = traced

    def line(self, where: str, how: str, value: object, owner: object = None) -> str:
        """What is at ``where``.

        Args:
            how: it came there, for messages.
            owner: the object that is there, if ``value`` is made for each key.

        Raises:
            UntoldError: it cannot be told.
        """
        try:
            text = text_of(value, self.vouched, by_source=self._traced)
        except UntoldError as exc:
            raise UntoldError(f"{where} {how}, and {exc}", value) from exc
        if not self._traced:
            self._watch(where, text, value, value if owner is None else owner)
        return f"{where}={text}"

    @staticmethod
    def _watch(where: str, text: str, value: object, owner: object) -> None:
        """Refuse what keeps state that it writes itself: no other process has the same.

        The first graph of a process may have been cached as a whole before that is seen.
        """
        before, was = _seen.get(where, (None, text))
        _seen[where] = owner, text
        if before is not owner:
            _writing.discard(where)
        elif text != was and any(map(written_by, foreign_parts(value))):
            _writing.add(where)
        if where in _writing:
            part = next(iter(foreign_parts(value)), value)
            raise UntoldError(
                f"{where} was replaced by {name_of(part)}, which keeps state that changes as it is"
                " called, such as a count or a time: its graphs are only shared in halves, which"
                " name it by its source",
                value,
            )


def _stale(text: _Texts) -> Iterator[str]:
    """What torch remembers of a table that has changed since: by that it goes."""
    found = internals.stale_decompositions()
    if found is None:
        return
    now, fresh = found
    for name in now.keys() | fresh.keys():
        value = now.get(name, ABSENT)
        if value is not fresh.get(name, ABSENT):
            yield text.line(f"remembered {shown(name)}", "was registered anew", value)


_torchs: set[object] = set()  # hundreds, and they stay


def _kernels(text: _Texts) -> Iterator[str]:
    """What torch's own operators are registered as in Python by others."""
    for where, function in replaced_kernels().items():
        if function is None:
            raise UntoldError(
                f"{where} was registered before s3cache was enabled, so what it does cannot be told"
            )
        yield text.line(where, "was registered anew", function)
    for name, on, function in _foreign_fakes():
        if is_of_torch(name):
            yield text.line(f"{name} on {on}", "was registered anew", function)


_Insides: TypeAlias = tuple[list[tuple[str, FunctionType]], list[Entry], list[Member]]
_looked: tuple[weakref.ref[TracingContext], _Insides] | None = None


def _look_inside(*, again: bool) -> _Insides:
    """What is not torch's in its own code: much to look at, so once for each compile."""
    global _looked
    context = internals.current_tracing_context.get()()
    if not again and _looked is not None and context is not None and _looked[0]() is context:
        return _looked[1]
    found = altered_functions(), replaced_entries(), replaced_members()
    _looked = None if context is None else (weakref.ref(context), found)
    return found


def _insides(text: _Texts, *, again: bool) -> Iterator[str]:
    """What torch's own functions and operators have in them by others, in no namespace."""
    functions, entries, members = _look_inside(again=again)
    for where, function in functions:
        version = text.vouched(function)
        if version is None:
            yield text.line(f"inside {where}", "was altered", stand_in_for(function), function)
        else:
            yield f"inside {where}=version {version}"
    for entry in entries:
        yield text.line(entry.place, entry.how, entry.value)
    for member in members:
        yield text.line(member.place, "was replaced", member.value)


def _foreign_fakes() -> Iterator[tuple[str, str, object]]:
    """Those of :func:`_fakes` that are not torch's."""
    for name, on, function in _fakes():
        if function in _torchs:
            continue
        if is_foreign(function, ""):
            yield name, on, function
        else:
            _torchs.add(function)


def _fakes() -> Iterator[tuple[str, str, object]]:
    """What runs on fake tensors, and on those of other classes, in place of operators."""
    for name, entry in list(internals.fake_registry.get().items()):
        kernel = entry.fake_impl.kernel
        if kernel is not None:
            yield name, "fake tensors", kernel.func
        for rule in entry.torch_dispatch_rules._data.values():
            yield name, "a class of tensors", rule


# -- namespaces and tables


class _Watched:
    """One namespace or table, what torch had in it, and what it had when it was last looked at.

    Most looks find what the last one did, which takes some microseconds for a thousand entries.
    What is there is told by what it is, and not by what it says that it equals.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.module = place.partition(":")[0]
        self._pristine: Mapping[object, object] | None = None
        self._values: list[object] = []
        self._replaced: dict[object, object] = {}

    def note(self, pristine: Mapping[object, object] | None = None) -> None:
        """What is there now, or ``pristine``, is torch's, unless that is known."""
        if self._pristine is None:
            self._pristine = dict(
                internals.contents(self.place) or {} if pristine is None else pristine
            )
            self._values = list(self._pristine.values())
            remember_insides(self._values)

    def survey(self) -> None:
        """Somebody may have been here before: of what is there now, torch's is what looks so."""
        if self._pristine is not None:
            return
        if (known := _s3cache_autoload.pristine.get(self.place)) is not None:
            self.note(known)
        else:
            now = internals.contents(self.place) or {}
            self.note({name: each for name, each in now.items() if not self._is_others(each, name)})

    def _is_others(self, value: object, name: object) -> bool:
        if is_foreign(value, name):
            return True
        return self._is_late and isinstance(name, str) and is_misplaced(value, self.place, name)

    def replaced(self) -> dict[object, object]:
        """What is there now in place of what torch had, by name; what is gone is told apart."""
        now = internals.contents(self.place)
        if now is None:
            return {}
        if self._pristine is None:
            self.survey()
        if not self._is_as_before(now):
            self._replaced = dict(self._differences(dict(now)))
            self._values = list(now.values())
        return self._replaced

    def _is_as_before(self, now: Mapping[object, object]) -> bool:
        return internals.are_identical(now.values(), self._values)

    def _differences(self, now: dict[object, object]) -> Iterator[tuple[object, object]]:
        assert self._pristine is not None
        for name, value in now.items():
            old = self._pristine.get(name, ABSENT)
            if value is old or name in internals.NOT_COMPILED:
                continue
            if old is ABSENT:
                if self._matters(name) and (self._is_others(value, name) or self._shadows(name)):
                    yield name, value
            elif self._is_about(old, value) and not are_alike(old, value):
                yield name, value
        for name in self._pristine.keys() - now.keys():
            if is_code(self._pristine[name]) and name not in internals.NOT_COMPILED:
                yield name, ABSENT

    def _is_about(self, old: object, value: object) -> bool:
        """Whether it is code; other values are torch's own state, but Python has constants."""
        return is_code(old) or is_code(value) or self.module in ("cmath", "math")

    def _matters(self, name: object) -> bool:
        """Whether torch can come by what was added under ``name``."""
        return internals.is_table(self.place) or self._shadows(name) or self._is_late

    @property
    def _is_late(self) -> bool:
        return self.place not in _s3cache_autoload.pristine

    def _shadows(self, name: object) -> bool:
        return not internals.is_table(self.place) and internals.is_shadowed(self.place, str(name))


@functools.cache
def _watched() -> tuple[_Watched, ...]:
    namespaces = (*_s3cache_autoload.PLACES, *internals.LATER_PLACES)
    return tuple(map(_Watched, namespaces))
