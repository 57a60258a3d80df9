"""Find everything in torch that compiling reads and that a program has replaced.

A replacement that can only change the traced graph sends every graph to the second level, where the
traced graph is in the key. A replacement that can change generated code must have an identity, at
both levels.

Containers are compared with copies from the end of ``import torch``. For modules that are imported
later, or without such a copy, the first look is the reference, without values that are not torch's.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType

import _s3cache_process
from s3cache.graph._describe import (
    UnidentifiedError,
    identity,
    qualified_name,
    rough_identity,
)
from s3cache.graph._origin import (
    files_that_register_for_others,
    foreign_parts,
    is_code,
    is_foreign,
    is_of_others,
    is_of_torch,
    is_operator_of_torch,
    is_plain,
    origin_of,
    parts_of,
)
from s3cache.graph._results import BypassReason, Finding, suggested_fix
from s3cache.graph._surface import (
    ALTERED,
    AS_A_WHOLE,
    REPLACED,
    Override,
    Surface,
    WatchedOperators,
)
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import TracingContext
from s3cache.util.importing import when_imported
from s3cache.util.snapshot import ABSENT, CALLS, code_digest, content_of

_surface, _operators = Surface(), WatchedOperators()
_torchs: dict[int, object] = {}  # patterns and functions of torch, by id; kept alive
_last: tuple[weakref.ref[TracingContext], list[Override]] | None = None

# The modules with which Inductor generates code, and those of them that run before.
_GENERATING = (
    "cmath",
    "math",
    "operator",
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


def take_baseline(*, early: bool) -> Callable[[], None]:
    """Copy torch's containers now, and later ones right after their import; return the undo.

    Earlier is better: every replacement after it is detected for certain. It is ``early`` if torch
    is being imported now, so that no program can have changed anything.
    """
    if early:
        _s3cache_process.take_baseline()
    _s3cache_process.note_imports()
    _operators.watch(trusted=early)
    if internals.COMPILER in sys.modules:
        return lambda: None
    CALLS.begin()
    return when_imported(internals.COMPILER, _look_first)


def _look_first() -> None:
    """Look at all of torch after its compiler is imported, so that the first key is faster."""
    with suppress(Exception):  # the first key tries again, and can report the error
        _surface.overrides()
        _operators.overrides()
        replaced_kernels()
        list(foreign_fakes())


@atexit.register
def _forget() -> None:
    """Drop all references at exit: torch destroys its objects in its own order."""
    global _surface, _operators, _last
    _surface, _operators, _last = Surface(), WatchedOperators(), None


def all_overrides(*, again: bool = True) -> list[Override]:
    """Return everything that others have replaced in torch or registered with it.

    Most of it is examined once per compile, unless ``again`` is set.
    """
    return [
        *_in_containers(again=again),
        *_stale_decompositions(),
        *(
            Override(where, function, "was registered again")
            for where, function in (*replaced_kernels().items(), *foreign_fakes())
        ),
        *registered_overrides(),
    ]


def _in_containers(*, again: bool) -> list[Override]:
    global _last
    context = internals.current_tracing_context.get()()
    if not again and _last is not None and context is not None and _last[0]() is context:
        return _last[1]
    found = [*_surface.overrides(), *_operators.overrides()]
    _last = None if context is None else (weakref.ref(context), found)
    return found


def _stale_decompositions() -> Iterator[Override]:
    """Yield tables that changed after torch copied them: torch uses its copies."""
    now, fresh = internals.stale_decompositions()
    for name in now.keys() | fresh.keys():
        if name in fresh and is_of_others(name):
            continue
        if (value := now.get(name, ABSENT)) is not fresh.get(name, ABSENT):
            yield Override(f"remembered {name}", value, "was registered again")


def overrides(
    registered: Callable[[object], str | None] = lambda _: None,
    *,
    again: bool = True,
    traced: bool = False,
) -> Finding:
    """Return a component for all replacements, or a reason for each without an identity.

    ``traced`` says that the key covers the traced graph; ``again`` is as in :func:`all_overrides`.
    """
    lines: list[str] = []
    refused: list[tuple[Override, UnidentifiedError]] = []
    try:
        found = all_overrides(again=again)
    except UnidentifiedError as exc:
        return [BypassReason("generator", str(exc), "put torch's own back")]
    CALLS.check_present(each.value for each in found)
    for each in found:
        try:
            lines.append(f"{each.place}={_text(each, registered, traced=traced)}")
        except UnidentifiedError as exc:
            refused.append((each, exc))
    if _surface.unknown:
        places = "\n".join(
            f"{place}={digest}" for place, digest in sorted(_surface.unknown.items())
        )
        lines.append(f"there before: {hashlib.sha256(places.encode()).hexdigest()[:32]}")
    if kept := unused_kept():
        lines.append(f"not removed though unused: {' '.join(kept)}")
    return [*_reasons(refused)] or "\n".join(sorted(lines))


def _generates(override: Override) -> bool:
    """Return True if it may be called during code generation, after a graph was traced."""
    return override.place.startswith(_GENERATING) and not override.place.startswith(_TRACING)


def _text(override: Override, registered: Callable[[object], str | None], *, traced: bool) -> str:
    value = override.value
    version = registered(value)
    if version is not None:
        return f"version {version}"
    if _generates(override):
        if override.how in (ALTERED, AS_A_WHOLE):
            raise UnidentifiedError("may do anything", value)
        return identity(value, registered)
    if isinstance(value, type) and not is_foreign(value):
        return qualified_name(value)  # such as torch.Storage with another default dtype
    if override.how == REPLACED and _is_torchs(value):
        return identity(value, registered)
    if not traced:
        why = CALLS.why_used(value if override.how == REPLACED else None)
        if why:
            raise UnidentifiedError(why, value)
        return f"not called: {rough_identity(value, registered)}"
    if override.how == ALTERED and isinstance(value, FunctionType):
        return code_digest(value.__code__)
    return rough_identity(value, registered)


def _is_torchs(value: object) -> bool:
    """Return True for torch's own functions and operators, for constants, and for nothing."""
    if internals.is_operator(value):
        return is_operator_of_torch(value)
    if value is ABSENT or is_plain(value):
        return True
    return is_code(value) and all(origin_of(part).kind == "torch" for part in parts_of(value))


def _reasons(refused: list[tuple[Override, UnidentifiedError]]) -> Iterator[BypassReason]:
    """Yield a reason for each library, which users cannot change, and for other replacements."""
    of_libraries: dict[str, list[tuple[Override, UnidentifiedError]]] = {}
    for override, error in refused:
        origin = origin_of(next(iter(foreign_parts(override.value)), override.value))
        if origin.kind == "library" and not _generates(override):
            _, name, version, _ = origin.name.split()
            of_libraries.setdefault(f"{name} {version}", []).append((override, error))
        else:
            yield _unsafe(override, error)
    for library, found in of_libraries.items():
        places = ", ".join(sorted(override.place for override, _ in found))
        message = (
            f"{library} has replaced {places}, which {found[0][1]}: each process traces its "
            "graphs again, and shares only the code that is compiled from them"
        )
        yield BypassReason("override", message, target=library)


def _unsafe(override: Override, error: UnidentifiedError) -> BypassReason:
    place, value = override.place, override.value
    part = error.about if isinstance(value, tuple) else next(iter(foreign_parts(value)), value)
    what = f"a file, {value}" if isinstance(value, str) else qualified_name(part)
    if value is ABSENT:
        what = "nothing"
    elif override.how == ALTERED:
        what = "a program"
    fix = otherwise = "put torch's own back"
    about = error.about if hasattr(error.about, "__qualname__") else part
    if hasattr(about, "__qualname__"):
        fix = suggested_fix(about, f"if it depends on its inputs alone; or {otherwise}")
    if _generates(override):
        message = f"{place} {override.how} by {what}, which generates code and {error}"
        return BypassReason("generator", message, fix, target=place)
    message = f"{place} {override.how} by {what}, which {error}"
    return BypassReason("override", message, fix, target=place)


# -- kernels in Python
#
# The dispatcher's kernels cannot be read. It only lists the dispatch keys of an operator that have
# a kernel, and the file that registered it. We know a kernel if it was registered while a cache was
# enabled. Functions that torch keeps outside of the dispatcher, such as fake implementations, are
# read from torch's tables.

_NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".mm")
_MAX_DEPTH = 4


class _Recorded:
    """Kernels that were registered while a cache was enabled, and the results about them."""

    def __init__(self, *, is_complete: bool) -> None:
        self.is_complete = is_complete  # since `import torch`: no earlier kernel was replaced
        self.kernels: dict[str, object] = {}  # by operator and key, in torch's notation
        self.count = 0
        self.last: tuple[object, dict[str, object]] | None = None


_recorded = _Recorded(is_complete=True)


def record_kernel(where: str, function: object) -> None:
    """Record that `function` is registered for an operator and key, in torch's notation.

    It may replace a kernel of torch, which cannot be detected otherwise.
    """
    _recorded.kernels[where] = function
    _recorded.count += 1


def forget_kernels() -> None:
    """Forget the records: from now on, replaced kernels are not recorded."""
    global _recorded
    _recorded = _Recorded(is_complete=False)
    CALLS.end()
    _registered_at.cache_clear()


def replaced_kernels() -> dict[str, object]:
    """Return Python kernels that others registered for torch's own operators.

    By operator and key, in torch's notation: the function if it was recorded, or else the file that
    registered it.
    """
    present = internals.python_kernels.get()
    baseline = _s3cache_process.baseline.get(_s3cache_process.KERNELS, {})
    new = present - baseline.keys() if _recorded.is_complete else set(present)
    seen = present & _recorded.kernels.keys()
    state = _recorded.count, seen, new
    if _recorded.last is None or _recorded.last[0] != state:
        _recorded.last = state, dict(_find_replaced(seen, new))
    return _recorded.last[1]


def _find_replaced(seen: set[str], new: set[str]) -> Iterator[tuple[str, object]]:
    for where in sorted(seen | new):
        name, _, key = where.rpartition("/")
        name = name.replace("/", "::", 1)
        if where in seen and not _is_kernel_of_torch(_recorded.kernels[where]):
            found = _recorded.kernels[where]
        elif where in new:
            found = _path_of_others(name, key)
        else:
            continue
        if found and is_of_torch(name):
            yield where, found


def _is_kernel_of_torch(function: object) -> bool:
    if id(function) in _torchs:
        return True
    if any(map(is_foreign, (function, *_formulas_in(function, 0)))):
        return False
    _torchs[id(function)] = function
    return True


def _formulas_in(value: object, depth: int) -> Iterator[object]:
    """Yield the functions of a backward formula: torch keeps them in an object in a class."""
    if depth > _MAX_DEPTH or internals.is_operator(value):
        return
    if isinstance(value, FunctionType):
        inner = [content_of(cell) for cell in value.__closure__ or ()]
    elif isinstance(value, type):
        inner = [each.__func__ for each in vars(value).values() if isinstance(each, staticmethod)]
    else:
        kinds = FunctionType, MethodType, partial
        inner = [
            each for each in getattr(value, "__dict__", {}).values() if isinstance(each, kinds)
        ]
        yield from inner
    for each in inner:
        yield from _formulas_in(each, depth + 1)


def foreign_fakes() -> Iterator[tuple[str, object]]:
    """Yield functions of others that are called instead of torch's during tracing.

    Each comes with the operator and its purpose.
    """
    for place, name, function in _fakes():
        if id(function) in _torchs:
            continue
        if not is_foreign(function):
            _torchs[id(function)] = function
        elif is_of_torch(name):
            yield f"{name} {place}", function


def _fakes() -> Iterator[tuple[str, str, object]]:
    for name, kept in list(internals.fake_registry.get().items()):
        kernel = kept.fake_impl.kernel
        if kernel is not None:
            yield "on fake tensors", name, kernel.func
        for rule in kept.torch_dispatch_rules._data.values():
            yield "on a class of tensors", name, rule
    for name, definition in list(internals.custom_operators.get().items()):
        for function in (
            definition._abstract_fn,
            definition._backward_fn,
            definition._setup_context_fn,
            definition._vmap_fn,
            *definition._torch_dispatch_fns.values(),
        ):
            if function is not None:
                yield "on tracing", name, function


def _path_of_others(name: str, key: str) -> str:
    """Return the file that registers a kernel, or "" if torch does."""
    paths = [path for each, path in _registered_at(name) if each == key]
    if not paths:  # registered after the last look
        _registered_at.cache_clear()
        paths = [path for each, path in _registered_at(name) if each == key]
    home = internals.torch_directory()
    for_others = files_that_register_for_others() if name.startswith("aten::") else ()
    found = (path for path in paths if path.startswith(for_others) or not path.startswith(home))
    return next(found, "")


@functools.cache
def _registered_at(name: str) -> list[tuple[str, str]]:
    """Return the keys of Python kernels, with the files that registered them."""
    return [
        (key.partition("[")[0], path)
        for key, path in internals.REGISTERED_AT.findall(internals.dispatch_dump.get()(name))
        if not path.endswith(_NATIVE)
    ]


# -- Inductor's registries


_PLAIN = (type(None), bool, int, float, str, bytes)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


def registered_overrides() -> Iterator[Override]:
    """Yield registrations by others, with their functions and classes.

    Raises:
        UnidentifiedError: a pattern has no text that is equal in other processes.
    """
    patterns = list(_patterns())
    yield from patterns
    if patterns:  # their replacements in a graph are decomposed
        for operator, function in list(internals.decompositions.get().items()):
            if is_of_others(operator) and is_foreign(function):
                yield _registered(f"{internals.DECOMPOSITIONS} {operator}", (function,))
    # Code generation by device: schedulers and wrappers, and the operations that these call.
    tables = {"backend": internals.device_codegens, "operations": internals.device_overrides}
    for name, table in tables.items():
        for device, each in list(table.get().items()):
            values = tuple(vars(each).values()) or (each,)
            if any(map(_is_others, values)):
                yield _registered(f"torch._inductor: {name} {device}", values)
    rules = [rule for rule in list(internals.fake_rules.get()) if any(map(_is_others, rule))]
    for number, rule in enumerate(rules):
        yield _registered(f"torch._subclasses: rules for fake tensors {number}", rule)
    # The handler that chooses between implementations, if one is set.
    handler = getattr(internals.virtual.get(), internals.choices.get()._key, None)
    if handler is not None and _is_others(handler):
        yield _registered("torch._inductor: choices", (handler,))


def unused_kept() -> list[str]:
    """Return names of others' functions and operators for which torch keeps unused calls."""
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
    """Yield patterns with their positions: the first pattern that matches is applied."""
    for name, one in internals.pattern_passes():
        for (op, target), entries in list(one.patterns.items()):
            before = others = 0  # torch appends later patterns
            for entry in list(entries):
                values = vars(entry).values()
                if id(entry) in _torchs or not any(map(_is_others, values)):
                    _torchs[id(entry)] = entry
                    before += 1
                    continue
                text = repr(entry.pattern)
                if _ADDRESS.search(text):
                    raise UnidentifiedError(
                        f"a pattern in {name} has no name that is equal in other processes"
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
