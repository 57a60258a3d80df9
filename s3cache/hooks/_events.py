"""What s3cache does, among torch's own events of a compile.

They are in the log that ``TORCH_TRACE`` asks for, which tlparse shows, and those of the thread that
compiles also in what ``torch.profiler`` records.

Transfers run on threads that know nothing of torch, and in its log all events are of one thread,
where the end of one ends the last one begun: a transfer among them would end a compile. So they are
noted when they have ended, and written with lanes of their own by the thread that compiles, when it
comes by next; the last ones at the exit.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from s3cache import entries
from s3cache._forks import call_in_child
from s3cache.records import Event, Lanes, Transfers
from s3cache.stats import Listener
from s3cache.torch_api import internals

__all__ = ["Events"]

# Between two lookups a prefetch may end any number of them.
_KEPT = 1024
# torch's own events are in lane 0.
_LANE = 1
_MICROSECONDS = 1e6


class Events:
    """Shows what is looked up, saved and transferred, from now until :meth:`close`.

    Nothing that torch meets when it writes a trace is to end anybody's training.

    Args:
        subscribe: tells a listener of each transfer's steps; returns what ends this.
    """

    def __init__(self, subscribe: Callable[[Listener], Callable[[], None]]) -> None:
        self._subscribe = subscribe
        self._begin()
        call_in_child(self._begin)
        atexit.register(self.catch_up)

    def _begin(self) -> None:
        """Begin to note transfers, in this process."""
        self._mutex = threading.Lock()
        self._ended: deque[Event] = deque(maxlen=_KEPT)
        self._lanes = Lanes()
        self._named = 0
        self._forget = self._subscribe(Transfers(self._ended.append).note)

    @contextlib.contextmanager
    def shown(self, name: str) -> Iterator[dict[str, object]]:
        """Show the block as an event ``name``, with what the block puts into the mapping it gets.

        What was transferred meanwhile, and before, is shown too.
        """
        about: dict[str, object] = {}
        end = None
        with contextlib.suppress(Exception):
            end = internals.begin_event(name, time.time_ns())
        try:
            yield about
        finally:
            if end is not None:
                with contextlib.suppress(Exception):
                    end(time.time_ns(), about)
            self.catch_up()

    def catch_up(self) -> None:
        """Write the transfers that have ended by now, if torch writes a trace."""
        if not self._ended:
            return
        with contextlib.suppress(Exception), self._mutex:
            ended = [self._ended.popleft() for _ in range(len(self._ended))]
            if internals.writes_trace():
                for event in sorted(ended, key=lambda each: each.time - each.elapsed_s):
                    self._write(event)

    def _write(self, event: Event) -> None:
        began = event.time - event.elapsed_s
        lane = self._lanes.take(began, event.time)
        if lane >= self._named:
            self._named = lane + 1
            internals.trace_event(
                {"ph": "M", "name": "thread_name", "args": {"name": "s3cache transfers"}},
                lane=_LANE + lane,
            )
        internals.trace_event(
            {
                "ph": "X",
                "name": f"s3cache.{event.event}",
                "ts": began * _MICROSECONDS,
                "dur": event.elapsed_s * _MICROSECONDS,
                "args": {
                    "key": entries.key_of(event.name),
                    "name": event.name,
                    "bytes": event.size,
                    "ended": event.ended,
                },
            },
            lane=_LANE + lane,
        )

    def close(self) -> None:
        """Write what has ended, and note no more."""
        self._forget()
        self.catch_up()
        atexit.unregister(self.catch_up)
