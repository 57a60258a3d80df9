"""Events for who watches from outside: in torch's traces, and for ``s3cache warm`` and ``check``.

Lookups, saves and transfers are among torch's own events of a compile: in the log that
``TORCH_TRACE`` asks for, which tlparse shows, and, those of the thread that compiles, in what
``torch.profiler`` records.

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
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from s3cache import entries
from s3cache._forks import call_in_child
from s3cache._logs import logger_of
from s3cache.cache import Engine
from s3cache.graph import process_bypass_reasons
from s3cache.hooks._patching import Patches
from s3cache.records import Event, Lanes, Transfers
from s3cache.stats import Listener
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.hooks._records import LookupLog
    from s3cache.torch_api.protocols import Function

__all__ = ["Progress", "TraceEvents"]

logger = logger_of("records")

# Between two lookups a prefetch may end any number of them.
_KEPT = 1024
# torch's own events are in lane 0.
_LANE = 1
_MICROSECONDS = 1e6
# Later steps are not noted: a run's records are bounded.
_STEPS_AT_MOST = 1000


class TraceEvents:
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


class Progress:
    """Notes how far one process is. Any thread may compile, or step an optimizer.

    Where :data:`s3cache.settings.WATCHED` is set, a process notes in its records, beside its
    lookups, when it begins and ends to compile, the steps of its optimizers, where Dynamo breaks a
    graph, and what torch would not even look up.
    """

    def __init__(self, engine: Engine, lookup_log: LookupLog) -> None:
        self._engine = engine
        self._lookup_log = lookup_log
        self._mutex = threading.Lock()
        self._compiling = 0
        self._steps: dict[int, int] = {}
        self._done = 0
        self._breaks = 0

    def install(self, patches: Patches) -> None:
        """Also where a compile has begun already: that is what torch's compiler is imported for."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        patches.replace(internals.while_compiling, self._watcher)
        patches.replace(internals.should_use_local_cache, self._asker)
        patches.at_undo(register_optimizer_step_post_hook(self._stepped).remove)
        self._engine.note(compiling=False, at=time.time())

    def _watcher(
        self, original: Function[AbstractContextManager[None]]
    ) -> Function[AbstractContextManager[None]]:
        @contextlib.contextmanager
        def install_callbacks(*args: object, **kwargs: object) -> Iterator[None]:
            self._began()
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                self._ended()

        return install_callbacks

    def _began(self) -> None:
        with self._mutex:
            self._compiling += 1
            if self._compiling == 1:
                self._engine.note(compiling=True, at=time.time())

    def _ended(self) -> None:
        with self._mutex:
            self._compiling -= 1
            if self._compiling == 0:
                self._engine.note(compiling=False, at=time.time())
            try:
                self._note_breaks()
            except Exception:  # no training run ends for a note
                logger.debug("graph breaks are not noted", exc_info=True)

    def _note_breaks(self) -> None:
        reasons = internals.graph_break_reasons.get()
        if len(reasons) < self._breaks:  # the program has had Dynamo forget
            self._breaks = 0
        for reason in reasons[self._breaks :]:
            self._engine.note(graph_break=internals.describe_break(reason))
        self._breaks = len(reasons)

    def _asker(self, original: Callable[[], bool]) -> Callable[[], bool]:
        def should_use_local_autograd_cache() -> bool:
            answer = original()
            if not (answer or any(internals.tiers_asked("aot"))):
                try:
                    self._lookup_log.bypassed("aot", process_bypass_reasons(), None)
                except Exception:
                    logger.debug("a graph is not noted", exc_info=True)
            return answer

        return should_use_local_autograd_cache

    def _stepped(self, optimizer: object, *_: object) -> None:
        """After ``optimizer.step()``; what is done is what each optimizer has done."""
        import torch

        if torch.compiler.is_compiling():  # a compiled optimizer is traced as if this were not here
            return
        with self._mutex:
            before = self._steps.get(id(optimizer), 0)
            self._steps[id(optimizer)] = before + 1
            if before > self._done or self._done >= _STEPS_AT_MOST:
                return
            done = min(self._steps.values())
            if done != self._done:
                self._done = done
                self._engine.note(steps=done)
