"""What people learn of lookups: records, torch's traces, logs, and how far a process is.

Lookups, saves and transfers are among torch's own events of a compile: in the log that
``TORCH_TRACE`` asks for, which tlparse shows, and, those of the thread that compiles, in what
``torch.profiler`` records. Transfers run on threads that know nothing of torch, and in its log all
events are of one thread, where the end of one ends the last one begun: a transfer among them would
end a compile. So transfers are noted when they have ended, and written with lanes of their own by
the thread that compiles, when it comes by next; the last ones at the exit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from s3cache import entries
from s3cache.cache import Engine, Hit, Miss
from s3cache.graph import BypassReason
from s3cache.hooks._keys import KeyHook
from s3cache.records import Event, Lanes, Record, Transfers
from s3cache.stats import Level, Listener, Reason
from s3cache.torch_api import internals
from s3cache.util.forks import call_in_child
from s3cache.util.logs import logger_of
from s3cache.util.pages import command

if TYPE_CHECKING:
    from torch.fx import GraphModule

logger, bypasses, records = logger_of("lookups"), logger_of("bypasses"), logger_of("records")

_MAX_SHOWN = 10  # reasons of one graph
_MAX_WARNED = 50  # reasons of one session
_MAX_FRAMES = 1000
# Under one key there may be any number of entries, of which these say enough.
_MAX_REJECTED = 16
# Between two lookups a prefetch may end any number of transfers.
_MAX_TRANSFERS = 1024
_FIRST_LANE = 1  # torch's own events are in lane 0
_MICROSECONDS = 1e6
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LEVELS = {"aot": "", "fx": ", second level"}


class Bypasses:
    """Counts the graphs of one session that are not cached, and warns of each reason once.

    A reason is a warning, with the way out, when it first occurs. After that, and once there were
    as many warnings as a log can bear, it is a line at level INFO. Any thread may use it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._warned: set[tuple[str, str]] = set()

    def warn(
        self,
        reasons: Sequence[BypassReason],
        error: Exception | None = None,
        *,
        what: str = "a graph is not cached as a whole",
    ) -> None:
        """Count a graph that is not cached for ``reasons``, and log them.

        Args:
            error: what led to reason ``error``: a mistake of ours needs its traceback.
        """
        self._engine.count_bypass({reason.code for reason in reasons})
        shown = reasons[:_MAX_SHOWN]
        with self._mutex:
            room = len(self._warned) < _MAX_WARNED
            new = {(each.code, each.target) for each in shown} - self._warned if room else set()
            self._warned |= new
        if self._engine.settings.strict:  # it is raised instead
            new = set()
        lines = [f"{what} ({shown[0].code}): {shown[0]}"]
        for index, reason in enumerate(shown):
            if index:
                lines.append(f"  and ({reason.code}): {reason}")
            if reason.fix:  # on a line of its own, to be pasted
                lines.append(f"    {reason.fix}")
        if len(reasons) > len(shown):
            lines.append(f"  and {len(reasons) - len(shown)} more")
        codes = dict.fromkeys(each.code for each in shown if (each.code, each.target) in new)
        if codes:
            lines.append(f"    read on: {command(*codes)}")
        bypasses.log(
            logging.WARNING if new else logging.INFO,
            "%s",
            "\n".join(lines),
            exc_info=error if "error" in codes else None,
        )


class LookupLog:
    """Gives the engine a record of each lookup. A failure to do so is logged once."""

    def __init__(self, engine: Engine, keys: KeyHook) -> None:
        self._events: TraceEvents | None = None
        self._engine = engine
        self._keys = keys
        self._failed = False
        self._has_hit = False
        self._has_hinted = False

    def show(self, events: TraceEvents) -> None:
        """Show lookups and saves in torch's traces from now on."""
        self._events = events

    @contextlib.contextmanager
    def shown(self, name: str) -> Iterator[dict[str, object]]:
        """Show the block in torch's traces, if it makes any, with what is put into the mapping."""
        if self._events is None or not internals.is_traced():
            yield {}
            return
        with self._events.shown(name) as about:
            yield about

    def ended(
        self,
        level: Level,
        key: str,
        outcome: Hit | Miss,
        *,
        saved_s: float = 0.0,
        of_whole: bool = False,
        rejected: Sequence[Callable[[], list[str]]] = (),
    ) -> dict[str, str]:
        """Record how a lookup under ``key`` ended; return that in words.

        Args:
            saved_s, of_whole: see :class:`Record`.
            rejected: functions that say why each entry was not used: called on a miss alone.
        """
        is_hit = isinstance(outcome, Hit)
        if isinstance(outcome, Hit):
            ending = {"outcome": "hit", "reason": str(outcome.tier)}
        else:
            ending = {"outcome": "miss", "reason": str(outcome.reason)}
            logger.debug("miss %s (%s%s)", key, ending["reason"], _LEVELS.get(level, ""))
        if not self._engine.settings.record:
            return ending
        if level == "aot":
            self._hint(outcome)
        with self._failing_once():
            known = self._keys.known(key)
            self._engine.record(
                Record(
                    level=level,
                    outcome=ending["outcome"],
                    reason=ending["reason"],
                    key=key,
                    time=time.time(),
                    elapsed_s=outcome.elapsed_s,
                    saved_s=saved_s,
                    where=users_line(),
                    of_whole=of_whole,
                    rejected=() if is_hit else tuple(map(_in_words, rejected[:_MAX_REJECTED])),
                    components={
                        name: (each.digest, each.value) for name, each in known.components.items()
                    },
                    parts={} if is_hit else known.parts,
                )
            )
        return ending

    def saved(self, key: str, size: int, elapsed_s: float, compile_s: float) -> None:
        """Record a save that took ``elapsed_s``, of what took ``compile_s`` to compile."""
        now = time.time()
        self._engine.record(Event("compile", now - elapsed_s, compile_s, key))
        self._engine.record(Event("save", now, elapsed_s, key, size))

    def bypassed(
        self,
        level: Level,
        reasons: Sequence[BypassReason],
        gm: GraphModule | None,
        *,
        key: str = "",
    ) -> None:
        """Record a graph that was not looked up, or not saved under the key that missed."""
        if not self._engine.settings.record:
            return
        with self._failing_once():
            self._engine.record(
                Record(
                    level=level,
                    outcome="bypass",
                    key=key,
                    reason=" ".join(dict.fromkeys(reason.code for reason in reasons)),
                    time=time.time(),
                    where=users_line(),
                    reasons=tuple(
                        {**reason.as_dict(), "line": "" if gm is None else line_of(gm, reason)}
                        for reason in reasons
                    ),
                )
            )

    def _hint(self, outcome: Hit | Miss) -> None:
        """Point to ``explain`` once, for the first graph that is absent where others hit."""
        if isinstance(outcome, Hit):
            self._has_hit = True
        elif self._has_hit and not self._has_hinted and outcome.reason is Reason.ABSENT:
            self._has_hinted = True
            logger.info("a graph missed where others hit; `s3cache explain` says why")

    @contextlib.contextmanager
    def _failing_once(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - no training run ends for a record
            if not self._failed:
                self._failed = True
                records.warning("lookups are not recorded", exc_info=exc)


def _in_words(why: Callable[[], list[str]]) -> str:
    text = ""
    with contextlib.suppress(Exception):  # what an entry has guards on may not be here at all
        text = "; ".join(why())
    return text or "what it relies on does not hold"


def users_line() -> tuple[str, int, str] | None:
    """Return file, line and function of the first frame outside of torch that called the compiler.

    Users' backends are between our caller and Dynamo: frames that they called do not count.
    """
    compiler, torchs = _places()
    found = None
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        name = frame.f_code.co_filename
        if name.startswith(compiler):
            found = None
        elif found is None and not name.startswith(torchs) and not _has_no_file(name):
            found = name, frame.f_lineno, frame.f_code.co_name
        if frame.f_back is None:
            break
        frame = frame.f_back
    return found


def _has_no_file(name: str) -> bool:
    return name.startswith("<") and name not in ("<stdin>", "<string>")


@functools.cache
def _places() -> tuple[str, tuple[str, ...]]:
    torch = internals.torch_directory()
    stdlib = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    # The frames of the standard library that may be in between.
    between = (stdlib + "contextlib.py", stdlib + "functools.py", stdlib + "threading.py")
    return os.path.join(torch, "_dynamo") + os.sep, (torch, _OURS, *between)


_TRACED = re.compile(r'File "([^"\n]+)", line (\d+), in [^\n]*(?:\n\s+([^\n]*))?')


def line_of(gm: GraphModule, reason: BypassReason) -> str:
    """Return the line of the user's program that a reason is about, as ``file:line: code``."""
    module = gm.get_submodule(reason.module) if reason.module else gm
    for node in getattr(getattr(module, "graph", None), "nodes", ()):
        if node.name == reason.node:
            traced = _TRACED.findall(str(node.meta.get("stack_trace") or ""))
            if traced:
                file, line, code = traced[-1]
                return f"{file}:{line}: {code.strip()}".rstrip(": ")
    return ""


class TraceEvents:
    """Shows lookups, saves and transfers in torch's traces until :meth:`close`.

    Errors while writing a trace never reach the program.

    Args:
        subscribe: registers a listener for each step of a transfer; returns what unregisters it.
    """

    def __init__(self, subscribe: Callable[[Listener], Callable[[], None]]) -> None:
        self._subscribe = subscribe
        self._begin()
        call_in_child(self._begin)
        atexit.register(self.catch_up)

    def _begin(self) -> None:
        """Begin to note transfers, in this process."""
        self._mutex = threading.Lock()
        self._ended: deque[Event] = deque(maxlen=_MAX_TRANSFERS)
        self._lanes = Lanes()
        self._named = 0
        self._forget = self._subscribe(Transfers(self._ended.append).note)

    @contextlib.contextmanager
    def shown(self, name: str) -> Iterator[dict[str, object]]:
        """Show the block as an event ``name``, with what is put into the mapping.

        Transfers that ended meanwhile, and before, are shown too.
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
                lane=_FIRST_LANE + lane,
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
            lane=_FIRST_LANE + lane,
        )

    def close(self) -> None:
        """Write what has ended, and note no more."""
        self._forget()
        self.catch_up()
        atexit.unregister(self.catch_up)
