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
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import _s3cache_autoload
from s3cache._importing import when_imported
from s3cache.graph._code import UntoldError, fingerprint
from s3cache.graph._homes import home_of
from s3cache.graph._reads import content_of
from s3cache.graph._registered import replaced_kernels
from s3cache.graph._stable import Component
from s3cache.torch_api import internals

__all__ = ["overrides", "remember_pristine"]

_NATIVE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MAX_DEPTH = 8
_ABSENT = object()
_BY_OTHER_NAMES = {
    "itruediv": "idiv",
    "logsigmoid": "log_sigmoid",
    "pos": "positive",
    "torch_dispatch": "disabled_torch_dispatch_impl",
    "torch_function": "disabled_torch_function_impl",
}


def remember_pristine() -> Callable[[], None]:
    """Take note of what torch has by now, and of the rest right after it is imported.

    The sooner the better: what is replaced later is known for certain to be replaced. What has been
    noted before stays.

    Returns:
        A function that takes back what is still to come.
    """
    waiting = _begin() if internals.TORCH in sys.modules else []

    def withdraw() -> None:
        for take_back in waiting:
            take_back()

    return withdraw


def _begin() -> list[Callable[[], None]]:
    later: dict[str, list[_Watched]] = {}
    for watched in _watched():
        if watched.module in sys.modules:
            watched.survey()
        else:
            later.setdefault(watched.module, []).append(watched)
    return [when_imported(name, partial(_note_all, each)) for name, each in later.items()]


def _note_all(watched: Sequence[_Watched]) -> None:
    for each in watched:
        each.note()


def overrides(vouched: Callable[[object], str | None] = lambda _: None) -> Component | None:
    """A component for all that is not as torch made it; ``None`` if everything is.

    Args:
        vouched: the version of a function that the user vouched for.

    Raises:
        UntoldError: something was replaced by what cannot be told; says what and where.
    """
    lines = [
        f"{watched.place}.{_shown(name)}={_text(value, vouched, watched.place, name)}"
        for watched in _watched()
        for name, value in watched.replaced().items()
    ]
    lines += _kernels(vouched)
    return Component.of_text("\n".join(sorted(lines))) if lines else None


_torchs: set[object] = set()  # kernels, hundreds, and they stay


def _kernels(vouched: Callable[[object], str | None]) -> Iterator[str]:
    """What torch's own operators are registered as in Python by others."""
    for where, function in (*replaced_kernels().items(), *_fakes()):
        if function in _torchs:
            continue
        if function is None:
            raise UntoldError(
                f"{where} was registered before s3cache was enabled, so what it does cannot be told"
            )
        if not _is_foreign(function, ""):
            _torchs.add(function)
            continue
        version = vouched(function)
        try:
            what = fingerprint(function) if version is None else f"version {version}"
        except UntoldError as exc:
            raise UntoldError(f"{where} was registered anew, and {exc}") from exc
        yield f"{where}={what}"


def _fakes() -> Iterator[tuple[str, object]]:
    """What runs on fake tensors, and on those of other classes, in place of torch's operators."""
    for name, entry in list(internals.fake_registry.get().items()):
        if internals.is_of_aten(name):
            kernel = entry.fake_impl.kernel
            if kernel is not None:
                yield f"{name} on fake tensors", kernel.func
            for rule in entry.torch_dispatch_rules._data.values():
                yield f"{name} on a class of tensors", rule


# -- namespaces and tables


class _Watched:
    """One namespace or table, what torch had in it, and what it had when it was last looked at.

    Most looks find what the last one did, which takes some microseconds for a thousand entries.
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

    def survey(self) -> None:
        """Somebody may have been here before: of what is there now, torch's is what looks so."""
        if self._pristine is not None:
            return
        if (known := _s3cache_autoload.pristine.get(self.place)) is not None:
            self.note(known)
        else:
            now = internals.contents(self.place) or {}
            self.note({name: each for name, each in now.items() if not _is_foreign(each, name)})

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
        if len(now) != len(self._values):
            return False
        try:
            return list(now.values()) == self._values  # by identity first, so nearly never by more
        except Exception:  # noqa: BLE001 - of objects that do not like to be compared
            return False

    def _differences(self, now: dict[object, object]) -> Iterator[tuple[object, object]]:
        assert self._pristine is not None
        for name, value in now.items():
            old = self._pristine.get(name, _ABSENT)
            if value is old or name in internals.NOT_COMPILED:
                continue
            if old is _ABSENT:
                if self._matters(name) and (_is_foreign(value, name) or self._shadows(name)):
                    yield name, value
            elif (callable(old) or callable(value)) and not _are_alike(old, value):
                yield name, value
        for name in self._pristine.keys() - now.keys():
            if callable(self._pristine[name]) and name not in internals.NOT_COMPILED:
                yield name, _ABSENT

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


# -- whose it is, and what


def _is_foreign(value: object, name: object) -> bool:
    """Whether ``value`` was not put under ``name`` by torch, as far as that can be seen."""
    if isinstance(value, _NATIVE):
        return isinstance(name, str) and not _bears(value.__name__, name)
    if not callable(value) or isinstance(value, type):
        return False
    return any(not _is_of_torch(part) for part in _parts(value, 0))


def _bears(own: str, name: str) -> bool:
    """Whether a native function is found under its name: ``linalg_inv`` is ``torch.linalg.inv``."""
    own, name = own.strip("_"), name.strip("_")
    return own in (name, _BY_OTHER_NAMES.get(name)) or own.endswith(f"_{name}")


def _are_alike(old: object, value: object) -> bool:
    """Whether torch has made the same anew, or only keeps Dynamo out of it."""
    if internals.is_kept_from_dynamo(value, old):
        return True
    if type(old) is not type(value) or isinstance(value, type):
        return False
    try:
        return _text(old) == _text(value)
    except UntoldError:
        return False


def _is_of_torch(value: object) -> bool:
    """Whether torch made it, or has it from Python or from what it builds on."""
    if not isinstance(value, (types.FunctionType, *_NATIVE)):
        called: object = getattr(type(value), "__call__", None)  # noqa: B004 - to see whose it is
        value = called if isinstance(called, types.FunctionType) else type(value)
    if isinstance(value, types.FunctionType) and internals.has_code_of_torch(value):
        return True
    if home_of(value).is_named:
        return True
    wrapping = sys.modules.get("typing_extensions")  # torch decorates with it
    return isinstance(value, types.FunctionType) and (
        wrapping is not None and value.__globals__ is vars(wrapping)
    )


def _parts(value: object, depth: int) -> Iterator[object]:
    """``value``, and all functions that it wraps: of closures, partials and bound methods."""
    if depth > _MAX_DEPTH:
        return
    yield value
    inner: tuple[object, ...] = ()
    if isinstance(value, types.FunctionType):
        inner = tuple(content_of(cell) for cell in value.__closure__ or ())
    elif isinstance(value, partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        inner = (value.__func__,)
    for each in inner:
        if callable(each) and not isinstance(each, type):
            yield from _parts(each, depth + 1)


def _text(
    value: object,
    vouched: Callable[[object], str | None] = lambda _: None,
    place: str = "",
    name: object = "",
) -> str:
    """What ``value`` is, in words that another process has for the same, and for nothing else."""
    if value is _ABSENT:
        return "nothing"
    version = vouched(value)
    if version is not None:
        return f"version {version}"
    try:
        return " ".join(_word(part) for part in _parts(value, 0))
    except UntoldError as exc:
        raise UntoldError(f"{place}.{_shown(name)} is not torch's, and {exc}") from exc


def _word(value: object) -> str:
    if isinstance(value, _NATIVE):
        owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
        home = owner if isinstance(owner, (type, types.ModuleType)) else type(owner)
        return f"{home.__name__}.{value.__name__}"
    if isinstance(value, types.FunctionType) and internals.has_code_of_torch(value):
        code = value.__code__
        file = code.co_filename.removeprefix(internals.torch_directory())
        cells = [content_of(cell) for cell in value.__closure__ or ()]
        plain = [repr(cell) for cell in cells if isinstance(cell, _PLAIN)]
        return f"{file}:{code.co_firstlineno}:{code.co_name}({', '.join(plain)})"
    if internals.is_operator(value):
        return str(value)
    if isinstance(value, partial):
        named = {k: v for k, v in value.keywords.items() if isinstance(v, _PLAIN)}
        return f"partial {[v for v in value.args if isinstance(v, _PLAIN)]} {sorted(named.items())}"
    return fingerprint(value)


def _shown(name: object) -> str:
    return name if isinstance(name, str) else str(name)
