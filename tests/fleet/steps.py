"""A process that compiles for others announces its steps to the harness.

:class:`Steps` wraps public methods: ``claim``, ``save``, and ``release`` of a claim.
It subscribes to uploads. A process announces a step and waits for the harness, which may first
carry out its mishap.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

from s3cache.cache import Engine
from s3cache.stats import TransferEvent

STEPS = ("claim", "compile", "save", "upload", "release")


class Steps:
    """Announces the steps of ``engine``, and the values ``about`` it, at the socket ``control``."""

    def __init__(self, engine: Engine, control: str, **about: object) -> None:
        self._control, self._about = control, about
        self._leads = False
        flight = engine.parts["single_flight"]
        flight_claim, engine_save = flight.claim, engine.save

        def claim(key: str, bound_s: float, kind: Any = "fx") -> Any:
            self.reached("claim", "in")
            began = time.monotonic()
            waited = flight_claim(key, bound_s, kind)
            took_s = time.monotonic() - began
            if waited is None:
                return None
            how = {"holder": waited.holder, "timed_out": waited.timed_out}
            self.tell("waited", key=key, took_s=took_s, **how)
            held = waited.claim
            taken_over = getattr(getattr(waited, "lease", None), "taken_over", False)
            self._leads = held is not None and (taken_over or not waited.holder)
            if held is not None and self._leads:
                if taken_over:
                    self.tell("taken over")
                release = held.release

                def released(*, published: bool) -> None:
                    self.reached("release", "in")
                    release(published=published)
                    self.reached("release", "after")

                held.release = released
                self.reached("claim", "after")
                self.reached("compile", "in")
            return waited

        def save(key: str, *args: Any, **options: Any) -> Any:
            if self._leads:
                self._leads = False
                self.reached("compile", "after")
            self.reached("save", "in")
            saved = engine_save(key, *args, **options)
            durable, kind = getattr(saved, "durable", False), options.get("kind", "aot")
            self.tell("saved", key=key, durable=durable, kind=kind)
            self.reached("save", "after")
            return saved

        flight.claim = claim
        engine.save = save  # type: ignore[method-assign]
        engine.subscribe(self._transferred)

    def _transferred(self, event: TransferEvent) -> None:
        if event.direction == "upload" and event.step in ("started", "done"):
            self.reached("upload", "in" if event.step == "started" else "after")

    def reached(self, step: str, moment: str) -> None:
        """Announce a step: ``in`` at its start, ``after`` at its end."""
        self.tell("reached", step=step, moment=moment)

    def tell(self, what: str, **more: object) -> None:
        """Send a message, and wait until the harness has handled it."""
        announce(self._control, what, **self._about, **more)


def announce(control: str, what: str, **more: object) -> None:
    with socket.socket(socket.AF_UNIX) as line, suppress(OSError):  # the harness may have ended
        line.connect(control)
        line.sendall(json.dumps({"what": what, "pid": os.getpid(), **more}).encode() + b"\n")
        line.recv(1)
