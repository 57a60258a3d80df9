"""What transfers tell whoever watches them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Listener", "Listeners", "Step", "TransferEvent"]

Step: TypeAlias = Literal["queued", "started", "done", "absent", "retried", "failed"]

logger = logging.getLogger("s3cache")


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One step of one transfer.

    Attributes:
        direction: ``upload`` or ``download``.
        step: ``queued`` and ``started`` come before it ends; it ends as ``done``, ``absent``
            (there is nothing to transfer) or ``failed``. An upload that is tried again after a
            pause is ``retried``, and ``started`` anew; a prefetched object that proves too large
            for the memory left is ``started`` anew too.
        name: the object.
        size: its bytes as far as known, else 0.
        error: why it failed or is retried.
    """

    direction: Literal["upload", "download"]
    step: Step
    name: str
    size: int = 0
    error: Exception | None = None


Listener: TypeAlias = Callable[[TransferEvent], None]


class Listeners:
    """Calls every listener with every event, on the thread where it happens."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Returns a function that removes the listener again."""
        with self._mutex:
            self._listeners = (*self._listeners, listener)
        return lambda: self._remove(listener)

    def emit(self, event: TransferEvent) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                # A progress bar that breaks must not take a transfer with it.
                logger.exception("s3cache: a transfer listener failed and is removed")
                self._remove(listener)

    def _remove(self, listener: Listener) -> None:
        with self._mutex:
            self._listeners = tuple(each for each in self._listeners if each is not listener)
