"""A circuit breaker: calls to something that keeps failing are not made for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from s3cache.errors import CircuitOpenError
from s3cache.util.words import counted

__all__ = ["Breaker", "BreakerState"]

BreakerState: TypeAlias = Literal["closed", "open", "half-open"]


class Breaker:
    """Decides whether a call may be made; any thread may call any method.

    Closed, calls pass, and ``failures`` in a row open it. Open, no call passes for
    ``reset_after_s``. Then it is half-open: exactly one call passes as a probe; its success closes
    the breaker, its failure opens it for as long again. What other calls come to, that began
    before it opened, does not count while it is open.

    Each call that :meth:`enter` lets pass ends with :meth:`succeed`, :meth:`fail` or, if it says
    nothing (it was cancelled), :meth:`leave`, with what ``enter`` returned.
    """

    def __init__(
        self, failures: int, reset_after_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_failures = failures
        self._reset_after_s = reset_after_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._failures = 0
        self._open_until: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        until = self._open_until
        if until is None:
            return "closed"
        return "half-open" if self._probing or self._clock() >= until else "open"

    def enter(self) -> bool:
        """Return whether the call about to be made is a probe.

        Raises:
            CircuitOpenError: it must not be made.
        """
        with self._mutex:
            if self._open_until is None:
                return False
            left_s = self._open_until - self._clock()
            if self._probing or left_s > 0:
                when = "a probe is under way" if self._probing else f"next probe in {left_s:.1f} s"
                raise CircuitOpenError(
                    f"circuit open after {counted(self._failures, 'failure')} in a row, {when}"
                )
            self._probing = True
            return True

    def succeed(self, is_probe: bool) -> None:
        """End a call that was answered."""
        self._end(is_probe, failed=False)

    def fail(self, is_probe: bool = False) -> None:
        """End a call that failed; or count a failure, such as a wait that was given up."""
        self._end(is_probe, failed=True)

    def leave(self, is_probe: bool) -> None:
        """End a call that says nothing: the next one is the probe then."""
        with self._mutex:
            self._probing &= not is_probe

    def _end(self, is_probe: bool, *, failed: bool) -> None:
        with self._mutex:
            if is_probe or self._open_until is None:
                self._failures = self._failures + 1 if failed else 0
                opens = failed and (is_probe or self._failures >= self._most_failures)
                self._open_until = self._clock() + self._reset_after_s if opens else None
            self._probing &= not is_probe
