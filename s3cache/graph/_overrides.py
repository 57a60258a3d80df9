"""Find everything in torch that compiling reads and that a program has replaced.

Compiling reads namespaces, classes, tables, functions and operators of torch: some fifty thousand
objects. A look examines only the containers that were written to since the last look. They are
compared with copies from the end of ``import torch``, or of the import of a later module. For
modules without such a copy the first look is the reference, without values that are not torch's.

A replacement that can only change the traced graph sends every graph to the second level, where the
traced graph is in the key. A replacement that can change generated code must have an identity, at
both levels.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import re
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import NamedTuple, TypeAlias, cast

import _s3cache_process
from _s3cache_process import LISTED, Copy, items_of
from s3cache.graph import _describe as describe
from s3cache.graph import _origin as origins
from s3cache.graph._describe import RegisteredVersion, UnidentifiedError, identity
from s3cache.graph._origin import is_code, is_plain, is_third_party, is_torch_operator, origin_of
from s3cache.graph._results import BypassReason, Code, Finding, fix_or
from s3cache.graph._user_code import replaced_kernels, third_party_fakes
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Operator, TracingContext
from s3cache.util import snapshot
from s3cache.util.importing import when_imported
from s3cache.util.snapshot import ABSENT, CALLS, FUNCTIONS

# The modules with which Inductor generates code, and those of them that run before.
_PYTHON = ("cmath", "math", "operator")
_GENERATING = (
    *_PYTHON,
    "torch._higher_order_ops",
    "torch._inductor",
    "torch._ops",
    "torch._prims_common",
    "torch.fx",
    "torch.utils._sympy",
)
_TRACING = (
    "torch._inductor.decomposition",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.pre_grad",
)
# Names that Dynamo adds to the module of a function that it compiled, such as `torch.cond`. Only
# the compiled code of that function uses them.
_DYNAMOS = ("__compiled_fn_", "__resume_at_")
# Types of values that torch counts and remembers in its modules, such as the number of a graph.
_STATE = (int, float, type(None))
_UNKNOWN = object()  # in place of a third-party value that was there at the first look

_REPLACED, _REGISTERED, _AGAIN = "was replaced", "was registered", "was registered again"
# These do not determine the new behaviour.
_ALTERED, _AS_A_WHOLE = "was altered", "was replaced as a whole"


class Override(NamedTuple):
    """A value that replaces torch's own."""

    place: str
    value: object  # ABSENT if it was removed; its file if only that is known
    how: str = _REPLACED

    @property
    def generates(self) -> bool:
        """Whether it may be called during code generation, after a graph was traced."""
        return self.place.startswith(_GENERATING) and not self.place.startswith(_TRACING)


# -- containers


class Names:
    """A module or a class, with its original content by name."""

    def __init__(self, copy: Copy) -> None:
        self.place, self.inside, self.first = copy.place, copy.inside, copy.content
        self._module, self._listed_as = copy.module, LISTED.get(copy.place)
        self._form = "{}.{}" if copy.home is None else "{}[{}]"

    def compare(self) -> list[Override]:
        """Return the values that now replace torch's own."""
        now, changes = items_of(self.inside), []
        if snapshot.are_identical(now.values(), self.first.values()) and [*now] == [*self.first]:
            return []
        for name in {**self.first, **now}:
            old, new = self.first.get(name, ABSENT), now.get(name, ABSENT)
            if old is new or _without_hooks(old) == _without_hooks(new):
                continue
            new = origins.unwrap_patch(new)
            if self.is_override(name, origins.unwrap_patch(old), new):
                changes.append(Override(self._form.format(self.place, name), new))
        return changes

    def is_suspect(self, name: object, value: object) -> bool:
        """Return True for a value at the first look that is not torch's."""
        value = origins.unwrap_patch(value)
        return type(value) not in origins.SCALARS and is_third_party(value, surveyed=True)

    def is_override(self, name: object, old: object, new: object) -> bool:
        """Return True if a new value replaces torch's."""
        if str(name).startswith(_DYNAMOS) or (self._listed_as and name in internals.NOT_COMPILED):
            return False
        makes_code = self._module in _s3cache_process.modules
        if old is ABSENT:
            if self._listed_as and internals.is_shadowed(*self._listed_as, str(name)):
                return True
            is_in_class = self.place != self._module  # then it hides the names of bases
            return makes_code and (
                is_third_party(new) or (is_in_class and self._is_changed_value(name, old, new))
            )
        if new is ABSENT:
            return bool(self._listed_as) and is_code(old)
        codes = [
            is_code(value) or (makes_code and isinstance(value, types.ModuleType))
            for value in (old, new)
        ]
        if all(codes):
            return not _is_same_code(old, new)
        if is_third_party(new) or self._module in _PYTHON or (self._listed_as and any(codes)):
            return True
        return makes_code and self._is_changed_value(name, old, new)

    def _is_changed_value(self, name: object, old: object, new: object) -> bool:
        """Return True if a program, not torch, has set another number, text or table."""
        kinds = origins.kinds_of_values()
        if str(name).startswith("__") or (type(old) not in kinds and type(new) not in kinds):
            return False
        return not origins.is_same_value(old, new) and not self.is_state(name)

    def is_state(self, name: object) -> bool:
        """Return True if torch's own code assigns to it."""
        codes = _codes_in(self.inside, vars(sys.modules[self._module]))
        return any(snapshot.assigns(code, str(name)) for code in codes)


def _without_hooks(value: object) -> object:
    """Return something that is equal for values that are the same without hooks of s3cache."""
    if isinstance(value, origins.HOLDERS):
        return type(value), id(origins.unwrap_patch(value.__func__))
    return id(origins.unwrap_patch(value))


def _codes_in(*namespaces: Mapping[str, object]) -> Iterator[types.CodeType]:
    """Yield the code of torch's functions in modules and classes, and of wrapped functions."""
    for members in namespaces:
        for value in list(members.values()):
            if isinstance(value, type) and value.__module__ == members.get("__name__"):
                yield from _codes_in(vars(value))
            for part in origins.parts_of(value) if is_code(value) else ():
                path = part.__code__.co_filename if type(part) is FunctionType else ""
                if path.startswith(internals.torch_directory()):
                    yield part.__code__  # type: ignore[attr-defined]


def _is_same_code(old: object, new: object) -> bool:
    """Return True if torch made the same function again, or only hid it from Dynamo."""
    names = {_own_name(old), _own_name(new)}
    if internals.is_kept_from_dynamo(new, old) or (len(names) == 1 and None not in names):
        return True
    if type(old) is not type(new) or isinstance(new, type):
        return False
    try:
        return identity(old) == identity(new)
    except UnidentifiedError:
        return False


def _own_name(value: object) -> str | None:
    """Return module and name of a function of torch if they are unambiguous; else None."""
    while isinstance(value, (*origins.HOLDERS, functools._lru_cache_wrapper)):
        value = value.__wrapped__
    name = describe.qualified_name(value) if type(value) is FunctionType else "<"
    return None if "<" in name or origins.third_party_parts(value) else name


class Table(Names):
    """A dictionary, list or set of functions, operators and constants."""

    def is_state(self, name: object) -> bool:
        return False

    def is_suspect(self, name: object, value: object) -> bool:
        is_own = self.place.startswith(internals.DECOMPOSITIONS)
        return is_third_party(value) and not (is_own and origins.is_third_party_operator(name))

    def compare(self) -> list[Override]:
        changes = super().compare()
        if not self._listed_as and type(self.inside) not in (list, set):
            there = [name for name in items_of(self.inside) if name in self.first]
            if there != [name for name in self.first if name in there]:
                changes.append(Override(f"{self.place}[in another order]", there))
        return changes

    def is_override(self, name: object, old: object, new: object) -> bool:
        is_same = is_code(old) and is_code(new) and _is_same_code(old, new)
        if is_same or origins.is_same_value(old, new):
            return False
        if type(old) is int and type(new) is int and isinstance(self.inside, list):
            return False  # a counter of Python in a container that cannot be assigned to
        if new is ABSENT:  # `ExportedProgram.run_decompositions` removes some rules
            return self.place != internals.FAKE_RULES or not internals.is_decomposed_first(name)
        if old is not ABSENT or self.is_suspect(name, new):
            return True
        # At run time torch adds its own operators and functions, but no new numbers.
        everything = (name, new, *self.first, *self.first.values())
        return not self._listed_as and all(
            isinstance(value, origins.SCALARS) or internals.is_dtype(value) for value in everything
        )


class Operators:
    """A dictionary of operators: a namespace has operators, an operator has overloads.

    torch adds them at their first use.
    """

    def __init__(self, inside: dict[str, object], surface: Surface) -> None:
        self._inside, self._surface = inside, surface
        self._first: dict[object, object] = {}

    def compare(self) -> list[Override]:
        first, changes = self._first, []
        for name in [*first.keys() - self._inside.keys(), *list(self._inside)]:
            old, new = first.get(name, ABSENT), self._inside.get(cast("str", name), ABSENT)
            if old is new:
                continue
            whole = internals.full_name_there(self._inside, str(name))
            kind = internals.kind_of_operator(new)
            if old is not ABSENT and is_torch_operator(old):
                changes.append(Override(_place_in_ops(whole), new))
            elif kind and internals.full_name(new) == whole:
                first[name] = new
                self._surface.watch_operator(new, kind)
            elif old is not ABSENT:
                del first[name]
            elif (
                kind or internals.is_place_of_operator(self._inside, str(name))
            ) and is_torch_operator(whole):
                changes.append(Override(_place_in_ops(whole), new))
        return changes


def _place_in_ops(name: str) -> str:
    return f"torch.ops.{name}".replace("::", ".")


class Rules:
    """The rules of an operator, given by `py_impl` or written into its tables."""

    def __init__(self, operator: Operator, *, are_trusted: bool) -> None:
        self._operator = operator
        self._firsts = [
            {key: rule for key, rule in table.items() if are_trusted or not is_third_party(rule)}
            for table in internals.tables_of(operator)
        ]

    def compare(self) -> list[Override]:
        """Return rules that are not torch's; keep new ones that are."""
        changes = []
        for first, table in zip(self._firsts, internals.tables_of(self._operator), strict=True):
            for key in {**first, **table}:
                old, new = first.get(key, ABSENT), table.get(key, ABSENT)
                if old is ABSENT and self._is_torchs(new):
                    first[key] = new
                elif new is not old:
                    changes.append(Override(f"{self._operator} for {key}", new, _REGISTERED))
        return changes if changes and is_torch_operator(self._operator) else []

    def _is_torchs(self, rule: object) -> bool:
        """Return True for a function with the name of the operator, as torch's own have."""
        is_named = internals.kind_of_operator(self._operator) == "higher-order" or (
            getattr(rule, "__name__", "")
            == self._operator.name().rpartition("::")[2].partition(".")[0]
        )
        return is_named and not is_third_party(rule)


Container: TypeAlias = Names | Operators | Rules


class Surface:
    """All containers and functions of torch that exist so far."""

    def __init__(self) -> None:
        self._containers = snapshot.Snapshot[Container](internals.dict_version.get)
        self._overrides: dict[int, list[Override]] = {}  # by the id of a container
        self._count = 0  # of copies that were examined
        self._empty: list[Copy] = []  # tables, until another module of torch fills them
        self._seen: set[int] = set()  # ids of tables, which are kept alive
        self._are_trusted = False  # whether operators that exist now are torch's
        #: Digests of modules, classes and tables of which the original content is not known.
        self.unknown: dict[str, str] = {}

    def overrides(self) -> list[Override]:
        """Return replacements of torch's names, and additions to its tables."""
        _s3cache_process.copy_torch(is_original=False)
        self._seen.add(id(internals.side_effectful.get()))  # a registry with a separate check
        copies = [*_s3cache_process.copies.values()]
        # A table that is listed may have other names, too.
        new = sorted(copies[self._count :], key=lambda copy: copy.place not in LISTED)
        empty = [copy for copy in self._empty if not copy.content or not self._begin(copy)]
        self._empty = empty + [copy for copy in new if not self._begin(copy)]
        self._count = len(copies)
        for container in self._containers.changed():
            self._overrides[id(container)] = container.compare()
        changes = list(itertools.chain.from_iterable(self._overrides.values()))
        for name, module in _s3cache_process.modules.items():
            if (now := sys.modules.get(name, module)) is not module:
                changes.append(Override(name, now, _AS_A_WHOLE))
        for function in FUNCTIONS.changed():
            module_name = function.__globals__.get("__name__")
            changes.append(Override(f"{module_name}.{function.__qualname__}", function, _ALTERED))
        return changes

    def _begin(self, copy: Copy) -> bool:
        """Begin with a container, but not with a cache or a registry; return False if it is empty.

        Objects in a table make it one.
        """
        if copy.home is None:
            self._watch(Names(copy), copy)
            return True
        is_listed = copy.place in LISTED
        if not (is_listed or copy.content or copy.inside):
            return False
        is_inside = copy.home.home is None or id(copy.home.inside) in self._seen
        content = copy.content or items_of(copy.inside)
        items = (*content, *content.values())
        if id(copy.inside) not in self._seen and (
            is_listed or (is_inside and all(map(origins.is_constant, items)))
        ):
            self._watch(Table(copy), copy)
            self._seen.add(id(copy.inside))
        return True

    def _watch(self, container: Names, copy: Copy) -> None:
        inside = container.inside
        if type(inside) is internals.ordered_set.get():
            inside = internals.inside_of_ordered_set(inside)
        self._containers.add(container, inside)  # first, so that no write is missed
        if not copy.is_original:
            first = container.first
            suspects = [name for name in first if container.is_suspect(name, first[name])]
            first.update(dict.fromkeys(suspects, _UNKNOWN))
            # Other values of torch are the same in every process at this point.
            settled = {
                name: value
                for name, value in first.items()
                if value is not _UNKNOWN
                if type(value) not in _STATE or not container.is_state(name)
            }
            self.unknown[copy.place] = describe.digest_of(settled)
        changes = container.compare()
        is_filled = isinstance(container, Table) and not copy.content
        if is_filled and all(is_plain(each.value) for each in changes):
            # torch fills some tables at run time, most with nothing for each device. A process that
            # looks earlier does not see it.
            known = {each.place: repr(each.value) for each in changes if each.value is not None}
            self.unknown.update(known)
            container.first, changes = items_of(container.inside), []
        self._overrides[id(container)] = changes
        FUNCTIONS.add(container.first.values())

    def watch_operators(self, *, are_trusted: bool) -> None:
        """Begin with the operators that exist so far, which may be trusted, and later ones."""
        import torch

        self._are_trusted = are_trusted
        for inside in (vars(torch.ops), internals.higher_order_operators.get()):
            self._watch_once(Operators(inside, self), inside)
        self._are_trusted = False

    def watch_operator(self, value: object, kind: str) -> None:
        """Begin with a namespace, the overloads of an operator, or the rules of an overload."""
        if kind in ("namespace", "packet"):
            self._watch_once(Operators(vars(value), self), vars(value))
        else:
            operator = cast("Operator", value)
            rules = Rules(operator, are_trusted=self._are_trusted)
            self._watch_once(rules, *internals.tables_of(operator))

    def _watch_once(self, container: Container, *tables: Collection[object]) -> None:
        if id(tables[0]) not in self._seen:
            self._seen.add(id(tables[0]))
            self._containers.add(container, *tables)
            self._overrides[id(container)] = container.compare()


# -- Inductor's registries

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
_patterns_of_torch: dict[int, object] = {}  # by id; kept alive


def registered_overrides() -> Iterator[Override]:
    """Yield registrations by others, with their functions and classes.

    Raises:
        UnidentifiedError: a pattern has no text that is equal in other processes.
    """
    patterns = list(_patterns())
    yield from patterns
    if patterns:  # their replacements in a graph are decomposed
        for operator, function in list(internals.decompositions.get().items()):
            if origins.is_third_party_operator(operator) and is_third_party(function):
                yield Override(f"{internals.DECOMPOSITIONS} {operator}", (function,), _REGISTERED)
    # Code generation by device: schedulers and wrappers, and the operations that these call.
    tables = {"backend": internals.device_codegens, "operations": internals.device_overrides}
    generators = [
        (f"{name} {device}", tuple(vars(each).values()) or (each,))
        for name, table in tables.items()
        for device, each in list(table.get().items())
    ]
    # The handler that chooses between implementations, if one is set.
    handler = getattr(internals.virtual.get(), internals.choices.get()._key, None)
    for place, values in (*generators, ("choices", (handler,))):
        if _is_third_party(values):
            yield Override(f"torch._inductor: {place}", values, _REGISTERED)
    for number, rule in enumerate(filter(_is_third_party, list(internals.fake_rules.get()))):
        yield Override(f"torch._subclasses: rules for fake tensors {number}", rule, _REGISTERED)


def unused_kept() -> list[str]:
    """Return names of others' functions and operators for which torch keeps unused calls."""
    kept = list(internals.side_effectful.get())
    return sorted(
        str(each) if internals.is_operator(each) else internals.name_of(each)
        for each in kept
        if origins.is_third_party_operator(each) or _is_third_party(each)
    )


def _patterns() -> Iterator[Override]:
    """Yield patterns with their positions: the first pattern that matches is applied."""
    for name, one in internals.pattern_passes():
        for (op, target), entries in list(one.patterns.items()):
            before = others = 0  # torch appends later patterns
            for entry in list(entries):
                values = tuple(vars(entry).values())
                if id(entry) in _patterns_of_torch or not _is_third_party(values):
                    _patterns_of_torch[id(entry)] = entry
                    before += 1
                    continue
                text = repr(entry.pattern)
                if _ADDRESS.search(text):
                    raise UnidentifiedError(
                        f"a pattern in {name} has no name that is equal in other processes"
                    )
                known = str(target) if internals.is_operator(target) else internals.name_of(target)
                where = f"{op} {known} after {before} and {others} {text}"
                place = f"torch._inductor.fx_passes.{name} {where}"
                yield Override(place, (type(entry), *values), _REGISTERED)
                others += 1


def _is_third_party(value: object) -> bool:
    if type(value) in origins.SCALARS or internals.is_operator(value):
        return False
    if isinstance(value, (list, tuple)):
        return any(map(_is_third_party, value))
    if isinstance(value, type):
        return origin_of(value).kind not in ("torch", "python")
    return is_third_party(value) if callable(value) else _is_third_party(type(value))


# -- the component of the key

_surface = Surface()
_last: tuple[weakref.ref[TracingContext], list[Override]] | None = None


def take_baseline(*, early: bool) -> Callable[[], None]:
    """Copy torch's containers now, and later ones right after their import; return the undo.

    Earlier is better: every replacement after it is detected for certain. It is ``early`` if torch
    is being imported now, so that no program can have changed anything.
    """
    if early:
        _s3cache_process.take_baseline()
    _s3cache_process.note_imports()
    _surface.watch_operators(are_trusted=early)
    if internals.COMPILER in sys.modules:
        return lambda: None
    CALLS.begin()
    return when_imported(internals.COMPILER, _look_first)


def _look_first() -> None:
    """Look at all of torch after its compiler is imported, so that the first key is faster."""
    with suppress(Exception):  # the first key tries again, and can report the error
        _surface.overrides()
        replaced_kernels()
        list(third_party_fakes())


@atexit.register
def _forget() -> None:
    """Drop all references at exit: torch destroys its objects in its own order."""
    global _surface, _last
    _surface, _last = Surface(), None


def all_overrides(*, again: bool = True) -> list[Override]:
    """Return everything that others have replaced in torch or registered with it.

    Most of it is examined once per compile, unless ``again`` is set.
    """
    global _last
    context = internals.current_tracing_context.get()()
    if again or _last is None or context is None or _last[0]() is not context:
        changes = _surface.overrides()
        _last = None if context is None else (weakref.ref(context), changes)
    else:
        changes = _last[1]
    rules = [*replaced_kernels().items(), *third_party_fakes()]
    # Tables that changed after torch copied them: torch uses its copies.
    now, fresh = internals.stale_decompositions()
    for name in now.keys() | fresh.keys():
        rule = now.get(name, ABSENT)
        is_others = name in fresh and origins.is_third_party_operator(name)
        if rule is not fresh.get(name, ABSENT) and not is_others:
            rules.append((f"remembered {name}", rule))
    registered = [Override(where, function, _AGAIN) for where, function in rules]
    return [*changes, *registered, *registered_overrides()]


def overrides(
    registered: RegisteredVersion = lambda _: None, *, again: bool = True, traced: bool = False
) -> Finding:
    """Return a component for all replacements, or a reason for each without an identity.

    ``traced`` says that the key covers the traced graph; ``again`` is as in :func:`all_overrides`.
    """
    lines: list[str] = []
    refused: list[tuple[Override, UnidentifiedError]] = []
    try:
        changes = all_overrides(again=again)
    except UnidentifiedError as exc:
        return [BypassReason("generator", str(exc), "put torch's own back")]
    CALLS.check_present(override.value for override in changes)
    for override in changes:
        try:
            lines.append(f"{override.place}={_text(override, registered, traced=traced)}")
        except UnidentifiedError as exc:
            refused.append((override, exc))
    if _surface.unknown:
        places = "\n".join(f"{place}={text}" for place, text in sorted(_surface.unknown.items()))
        lines.append(f"there before: {hashlib.sha256(places.encode()).hexdigest()[:32]}")
    if kept := unused_kept():
        lines.append(f"not removed though unused: {' '.join(kept)}")
    return [*_reasons(refused)] or "\n".join(sorted(lines))


def _text(override: Override, registered: RegisteredVersion, *, traced: bool) -> str:
    value = override.value
    version = registered(value)
    if version is not None:
        return f"version {version}"
    if override.generates:
        if override.how in (_ALTERED, _AS_A_WHOLE):
            raise UnidentifiedError("may do anything", value)
        return identity(value, registered)
    if override.how == _REPLACED and _is_torchs(value):
        return identity(value, registered)
    if not traced:
        why = CALLS.why_used(value if override.how == _REPLACED else None)
        if why:
            raise UnidentifiedError(why, value)
        return f"not called: {describe.rough_identity(value, registered)}"
    if override.how == _ALTERED and isinstance(value, FunctionType):
        return describe.code_digest(value.__code__)
    return describe.rough_identity(value, registered)


def _is_torchs(value: object) -> bool:
    """Return True for torch's own functions and operators, for constants, and for nothing."""
    if internals.is_operator(value):
        return is_torch_operator(value)
    is_torchs = is_code(value) and all(
        origin_of(part).kind == "torch" for part in origins.parts_of(value)
    )
    return value is ABSENT or is_plain(value) or is_torchs


def _reasons(refused: list[tuple[Override, UnidentifiedError]]) -> Iterator[BypassReason]:
    """Yield a reason for each library, which users cannot change, and for other replacements."""
    of_libraries: dict[str, list[tuple[Override, UnidentifiedError]]] = {}
    for override, error in refused:
        value = override.value
        part = next(iter(origins.third_party_parts(value)), value)
        origin = origin_of(part)
        if origin.kind == "library" and not override.generates:
            _, name, version, _ = origin.name.split()
            of_libraries.setdefault(f"{name} {version}", []).append((override, error))
            continue
        part = error.about if isinstance(value, tuple) else part
        what = f"a file, {value}" if isinstance(value, str) else describe.qualified_name(part)
        if value is ABSENT or override.how == _ALTERED:
            what = "nothing" if value is ABSENT else "a program"
        fix = fix_or("put torch's own back", error.about, part)
        code: Code = "generator" if override.generates else "override"
        and_so = "which generates code and" if override.generates else "which"
        message = f"{override.place} {override.how} by {what}, {and_so} {error}"
        yield BypassReason(code, message, fix, target=override.place)
    for library, replaced in of_libraries.items():
        places = ", ".join(sorted(override.place for override, _ in replaced))
        message = (
            f"{library} has replaced {places}, which {replaced[0][1]}: each process traces its "
            "graphs again, and shares only the code that is compiled from them"
        )
        yield BypassReason("override", message, target=library)
