"""Wait for the first compile of a process, which enables the cache that its environment names."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class FirstCompile:
    """A wait that ends with the first compile, or when the program chooses a cache itself."""

    def __init__(self) -> None:
        self._enable: Callable[[], object] | None = None  # while this waits
        self._undo = contextlib.ExitStack()
        self._is_cancelled = False

    def wait(self, enable: Callable[[], object]) -> contextlib.ExitStack | None:
        """Call ``enable`` at the end, after undoing what the caller adds to the stack.

        Returns None, and does not wait, if the program has chosen before.
        """
        if self._is_cancelled:
            return None
        self._enable = enable
        return self._undo

    def end(self) -> None:
        """Enable the cache if this waits, unless the process is ending."""
        enable = self._enable
        if enable is not None and threading.main_thread().is_alive():
            self._stop()
            enable()

    def cancel(self) -> None:
        """Leave the choice to the program: the environment has no say any more."""
        self._is_cancelled = True
        self._stop()

    def _stop(self) -> None:
        self._enable = None
        self._undo.close()


first_compile = FirstCompile()
