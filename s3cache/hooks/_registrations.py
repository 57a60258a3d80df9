"""Seeing which kernels torch's dispatcher is given, from when we are enabled.

The dispatcher does not say later which function replaced a kernel of torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from s3cache.graph import forget_kernels, record_kernel, take_baseline
from s3cache.hooks._state import Patches
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function, OperatorLibrary
from s3cache.util.importing import when_imported

__all__ = ["watch_registrations"]


def watch_registrations(failed: Callable[[Exception], None]) -> Callable[[], None]:
    """Record kernels, and note what torch has by itself, from the end of ``import torch`` or now.

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
            waiting.append(take_baseline(early=early))
            if internals.is_supported():
                patches.replace(internals.register_kernel, _recorder)
        except Exception as exc:  # noqa: BLE001 - the program that imports torch goes on
            failed(exc)

    waiting.append(when_imported(internals.TORCH, begin))

    def stop() -> None:
        for take_back in waiting:
            take_back()
        patches.undo()
        forget_kernels()

    return stop


def _recorder(original: Function[object]) -> Function[object]:
    def impl(
        library: OperatorLibrary, name: object, function: object, *args: str, **kwargs: str
    ) -> object:
        result = original(library, name, function, *args, **kwargs)
        record_kernel(*internals.registered_kernel(library, name, function, *args, **kwargs))
        return result

    return impl
