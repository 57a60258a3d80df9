"""Seeing what torch's dispatcher and compiler are given, and by whom, from when we are enabled."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, SimpleNamespace

import _s3cache_autoload
from s3cache._importing import when_imported
from s3cache._logs import logger_of
from s3cache.graph import (
    begin_recording,
    forget_entries,
    forget_kernels,
    forget_registered,
    home_of_file,
    record_entry,
    record_kernel,
    record_registered,
    remember_pristine,
)
from s3cache.hooks._patching import Patches
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function, OperatorLibrary

__all__ = ["watch_registrations"]

logger = logger_of()


def watch_registrations(failed: Callable[[Exception], None]) -> Callable[[], None]:
    """Record each, and note what torch has by itself, from the end of ``import torch`` or now.

    Args:
        failed: called with what keeps it from that: keys cannot be trusted then.

    Returns:
        A function that puts torch back as it was, and forgets them.
    """
    patches = Patches()
    waiting: list[Callable[[], None]] = []

    early = internals.TORCH not in sys.modules

    def begin() -> None:
        try:
            waiting.append(remember_pristine(early=early))
            _watch(patches)
        except Exception as exc:  # noqa: BLE001 - the program that imports torch goes on
            failed(exc)

    waiting.append(when_imported(internals.TORCH, begin))
    if internals.is_supported():
        for module, watch in _WATCHED_LATER.items():
            waiting.append(when_imported(module, functools.partial(watch, patches)))

    def stop() -> None:
        for take_back in waiting:
            take_back()
        patches.undo()
        forget_kernels()
        forget_entries()
        forget_registered()

    return stop


def _watch(patches: Patches) -> None:
    earlier = _s3cache_autoload.registrations.end()
    if internals.is_supported():
        for namespace, key, args, kwargs, files in earlier:
            with _quietly():
                library = SimpleNamespace(ns=namespace, dispatch_key=key)
                where, function = internals.registered_kernel(library, *args, **kwargs)  # type: ignore[arg-type]
                record_kernel(where, function, by_torch=_is_torchs(files))
        patches.replace(internals.register_kernel, _recorder)
        patches.replace(internals.register_in_table, _table_recorder)
        begin_recording()


def _recorder(original: Function[object]) -> Function[object]:
    def impl(
        library: OperatorLibrary, name: object, function: object, *args: str, **kwargs: str
    ) -> object:
        result = original(library, name, function, *args, **kwargs)
        where, _ = internals.registered_kernel(library, name, function, *args, **kwargs)
        record_kernel(where, function, by_torch=_is_called_by_torch())
        return result

    return impl


def _table_recorder(original: Function[Function[object]]) -> Function[Function[object]]:
    def py_impl(operator: object, key: object) -> Function[object]:
        register = original(operator, key)
        by_torch = _is_called_by_torch()

        def inner(function: object) -> object:
            result = register(function)
            record_entry(operator, key, by_torch=by_torch)
            return result

        return inner

    return py_impl


# -- what is registered with Inductor, once that is imported


def _watch_patterns(patches: Patches) -> None:
    with _quietly():
        patches.replace(internals.register_pattern, _pattern_recorder)


def _watch_backends(patches: Patches) -> None:
    with _quietly():
        patches.replace(internals.register_backend, _backend_recorder)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Whoever imports the module need not know; the seams find out that this torch is another."""
    try:
        yield
    except Exception:
        logger.debug("what is registered with Inductor is not watched", exc_info=True)


_WATCHED_LATER = {
    internals.PATTERN_MATCHER: _watch_patterns,
    internals.BACKENDS: _watch_backends,
}


def _pattern_recorder(original: Function[None]) -> Function[None]:
    def register(entry: object, *args: object, **kwargs: object) -> None:
        if not _is_called_by_torch():
            record_registered(entry)
        original(entry, *args, **kwargs)

    return register


def _backend_recorder(original: Function[None]) -> Function[None]:
    def register_backend_for_device(device: str, *args: object, **kwargs: object) -> None:
        original(device, *args, **kwargs)
        if not _is_called_by_torch():
            record_registered(internals.backend_of(device))

    return register_backend_for_device


# -- by whom


def _is_called_by_torch() -> bool:
    """Whether a file of torch's registers it that does so for nobody else."""
    files: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not (files and not files[-1].startswith(_passing_on())):
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return _is_torchs(files)


def _is_torchs(files: Iterable[str]) -> bool:
    """Whether it is a file of torch's that has called what passes a registration on."""
    caller = next((file for file in files if not file.startswith(_passing_on())), None)
    return caller is not None and home_of_file(caller).kind == "torch"


@functools.cache
def _passing_on() -> tuple[str, ...]:
    """What is between us and whoever registers something."""
    home = internals.torch_directory()
    matcher = os.path.join("_inductor", "pattern_matcher.py")
    files = "library.py", "_ops.py", "_library" + os.sep, matcher
    return (*(os.path.join(home, each) for each in files), contextlib.__file__, __file__)
