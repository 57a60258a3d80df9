"""What waits between ``import torch`` and the first compile.

Most processes of a job compile nothing: launchers, workers that load data. They come no further
than :func:`wait_for_compiler`, and pay nothing for the rest.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from s3cache.torch_api import internals
from s3cache.util.importing import before_import

__all__ = ["ask_environment", "cancel", "go_ahead", "wait_for_compiler"]

_enable: Callable[[], None] | None = None
_withdraw: list[Callable[[], None]] = []
_cancelled = False


def wait_for_compiler(enable: Callable[[], None]) -> None:
    """Call ``enable`` once, right before torch's compiler is imported, unless cancelled.

    Or before something is loaded into torch's own caches, which a policy may forbid. What it
    raises, the import raises.
    """
    global _enable
    if not _cancelled:
        _enable = enable
        for module in (internals.COMPILER, internals.CODE_CACHES):
            _withdraw.append(before_import(module, go_ahead))


def ask_environment() -> None:
    """Enable the cache now where the environment asks for one, also before ``import torch``."""
    wanted = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if wanted and not _cancelled and "torch" not in sys.modules:
        import _s3cache_autoload

        _s3cache_autoload.autoload()
    go_ahead()


def go_ahead() -> None:
    """Do it now, if it is still waiting and the process does not end already."""
    enable = _enable
    if enable is not None and threading.main_thread().is_alive():
        _stop_waiting()
        enable()


def cancel() -> None:
    """The program has chosen by itself, before or after: nothing is to happen any more."""
    global _cancelled
    _cancelled = True
    _stop_waiting()


def _stop_waiting() -> None:
    global _enable
    while _withdraw:
        _withdraw.pop()()
    _enable = None
