"""What of torch is not as ``import torch`` made it: functions and tables that compiling reads.

Programs replace functions of torch: by assignment, or by registering a decomposition or a lowering.
Many of those run while a graph is traced or lowered, which names none of them: a graph calls
``layer_norm`` of ``torch.nn.functional``, and that calls whatever ``torch.layer_norm`` is by then.

Namespaces and tables are held against copies of them from the end of ``import torch``; what was
imported later, or where there is no such copy, against itself at the first look, less what is not
torch's. Whether something is torch's is decided by where its code lies, and by nothing that it says
of itself.

What can only change what is traced sends every graph to the second level, where what was traced is
in the key. What can change the code that is generated has to have an identity, at both levels.
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
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import _s3cache_autoload
from s3cache._importing import is_being_imported, when_imported
from s3cache.graph._altered import altered_functions, remember_insides, stand_in_for
from s3cache.graph._identity import UnidentifiedError, rough_identity
from s3cache.graph._members import Member, await_members, replaced_members
from s3cache.graph._placed import is_misplaced
from s3cache.graph._registered import is_of_torch, replaced_kernels
from s3cache.graph._registries import registered_others, unused_kept
from s3cache.graph._results import BypassReason, Component, qualified_name, suggested_fix
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


class _Replaced(NamedTuple):
    """One thing that is not torch's where torch looks.

    Attributes:
        place: where it is.
        how: it came there, for messages.
        value: what is there now, or the file that put it there if that is all that is known.
        owner: the object that is there, if ``value`` stands for it.
    """

    place: str
    how: str
    value: object
    owner: object = None

    @property
    def generates(self) -> bool:
        """Whether it may be called while code is generated, after a graph was traced."""
        place = self.place.removeprefix("inside ").removeprefix("the order of ")
        place = place.replace("/", ".")  # of a file
        return place.startswith(_GENERATING) and not place.startswith(_TRACING)


# Where the code lies that Inductor generates code with, and what of that runs before it does.
_GENERATING = (
    "cmath",
    "math",
    "operator",
    "_inductor",
    "torch._higher_order_ops",
    "torch._inductor",
    "torch._ops",
    "torch._prims_common",
    "torch.fx",
    "torch.utils._sympy",
    "fx.",
    "_higher_order_ops",
    "_ops.py",
    "_prims_common",
    "utils._sympy",
)
_TRACING = (
    "torch._inductor.decomposition",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.pre_grad",
    "_inductor.decomposition",
)


def overrides(
    registered: Callable[[object], str | None] = lambda _: None,
    *,
    again: bool = True,
    traced: bool = False,
) -> tuple[Component | None, list[BypassReason]]:
    """Return a component for all that is not as torch made it, if anything, and what has none.

    Args:
        registered: the version that the user registered a function with.
        again: whether to look into functions and operators even if that was done in this compile.
        traced: whether the key has what was traced.
    """
    lines: list[str] = []
    unsafe: list[BypassReason] = []
    try:
        for each in _all_replaced(again=again):
            try:
                lines.append(f"{each.place}={_text(each, registered, traced=traced)}")
            except UnidentifiedError as exc:
                unsafe.append(_unsafe(each, exc))
    except UnidentifiedError as exc:
        unsafe.append(BypassReason("generator", str(exc), "put torch's own back"))
    if kept := unused_kept():
        lines.append(f"not removed though unused: {' '.join(kept)}")
    return (Component.of_text("\n".join(sorted(lines))) if lines else None), unsafe


def _text(replaced: _Replaced, registered: Callable[[object], str | None], *, traced: bool) -> str:
    owner = replaced.value if replaced.owner is None else replaced.owner
    version = registered(owner)
    if version is not None:
        return f"version {version}"
    if replaced.generates or (traced and replaced.value is ABSENT):
        return text_of(replaced.value, registered)
    if isinstance(replaced.value, type) and not foreign_parts(replaced.value):
        return qualified_name(replaced.value)  # such as torch.Storage with another default dtype
    if not traced:
        raise UnidentifiedError("takes part in tracing", replaced.value)
    return rough_identity(replaced.value, registered)


def _unsafe(replaced: _Replaced, error: UnidentifiedError) -> BypassReason:
    place, value = replaced.place, replaced.value
    part = next(iter(foreign_parts(value)), value)
    what = f"a file, {value}" if isinstance(value, str) else qualified_name(part)
    if value is ABSENT:
        what = "nothing"
    otherwise = "put torch's own back"
    about = error.about if hasattr(error.about, "__qualname__") else part
    fix = otherwise
    if hasattr(about, "__qualname__"):
        fix = suggested_fix(about, f"if it depends on its inputs alone; or {otherwise}")
    if replaced.generates:
        message = f"{place} {replaced.how} by {what}, which generates code and {error}"
        return BypassReason("generator", message, fix, target=place)
    message = f"{place} {replaced.how} by {what}, which takes part in tracing every graph"
    return BypassReason("override", message, fix, target=place)


def _all_replaced(*, again: bool) -> Iterator[_Replaced]:
    for watched in _watched():
        for name, value in watched.replaced().items():
            yield _Replaced(f"{watched.place}.{shown(name)}", "was replaced", value)
    yield from _stale()
    for where, function in replaced_kernels().items():
        yield _Replaced(where, "was registered anew", function)
    for name, on, function in _foreign_fakes():
        if is_of_torch(name):
            yield _Replaced(f"{name} on {on}", "was registered anew", function)
    yield from _insides(again=again)
    for each in registered_others():
        yield _Replaced(f"{each.place} {each.what}", "was registered", each.values)


def _stale() -> Iterator[_Replaced]:
    """Yield what torch remembers of a table that has changed since: it goes by that."""
    found = internals.stale_decompositions()
    if found is None:
        return
    now, fresh = found
    for name in now.keys() | fresh.keys():
        value = now.get(name, ABSENT)
        if value is not fresh.get(name, ABSENT):
            yield _Replaced(f"remembered {shown(name)}", "was registered anew", value)


_torchs: set[object] = set()  # hundreds, and they stay


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


def _insides(*, again: bool) -> Iterator[_Replaced]:
    """Yield what torch's own functions and operators have in them by others, in no namespace."""
    functions, entries, members = _look_inside(again=again)
    for where, function in functions:
        yield _Replaced(f"inside {where}", "was altered", stand_in_for(function), function)
    for entry in entries:
        yield _Replaced(entry.place, entry.how, entry.value)
    for member in members:
        yield _Replaced(member.place, "was replaced", member.value)


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
    """Yield what is called in place of operators while they are traced, and is kept in Python."""
    for name, entry in list(internals.fake_registry.get().items()):
        kernel = entry.fake_impl.kernel
        if kernel is not None:
            yield name, "fake tensors", kernel.func
        for rule in entry.torch_dispatch_rules._data.values():
            yield name, "a class of tensors", rule
    for name, definition in list(internals.custom_operators.get().items()):
        for function in (
            definition._abstract_fn,
            definition._backward_fn,
            definition._setup_context_fn,
            definition._vmap_fn,
            *definition._torch_dispatch_fns.values(),
        ):
            if function is not None:
                yield name, "tracing", function


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
