"""Seeing which Python functions torch's dispatcher is given, from when we are enabled."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from types import FrameType

from s3cache._importing import when_imported
from s3cache.graph import (
    begin_recording,
    forget_entries,
    forget_kernels,
    home_of_file,
    record_entry,
    record_kernel,
    remember_pristine,
)
from s3cache.hooks._patching import Patches
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function, OperatorLibrary

__all__ = ["watch_registrations"]


def watch_registrations() -> Callable[[], None]:
    """Record each, and note what torch has by itself, from the end of ``import torch`` or now.

    Returns:
        A function that puts torch back as it was, and forgets them.
    """
    patches = Patches()
    waiting: list[Callable[[], None]] = []

    early = internals.TORCH not in sys.modules

    def begin() -> None:
        waiting.append(remember_pristine(early=early))
        _watch(patches)

    waiting.append(when_imported(internals.TORCH, begin))

    def stop() -> None:
        for take_back in waiting:
            take_back()
        patches.undo()
        forget_kernels()
        forget_entries()

    return stop


def _watch(patches: Patches) -> None:
    if internals.is_supported():
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


def _is_called_by_torch() -> bool:
    """Whether a file of torch's registers it that does so for nobody else."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_passing_on()):
        frame = frame.f_back
    return frame is not None and home_of_file(frame.f_code.co_filename).kind == "torch"


@functools.cache
def _passing_on() -> tuple[str, ...]:
    """What is between us and whoever registers something."""
    home = internals.torch_directory()
    files = "library.py", "_ops.py", "_library" + os.sep
    return (*(os.path.join(home, each) for each in files), contextlib.__file__)
