"""What people learn of lookups: a record of each, and why graphs are not looked up at all."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from s3cache._logs import logger_of
from s3cache._pages import command
from s3cache.cache import Engine, Hit, Miss
from s3cache.graph import BypassReason
from s3cache.hooks._events import TraceEvents
from s3cache.hooks._keys import KeySeam
from s3cache.records import Event, Record
from s3cache.stats import Level, Reason
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["Bypasses", "LookupLog", "in_words"]

logger, bypasses = logger_of("lookups"), logger_of("bypasses")

_SHOWN_AT_MOST = 10  # of one graph
_WARNED_AT_MOST = 50  # of one session
_FRAMES_AT_MOST = 1000
# Under one key there may be any number of entries, of which these say enough.
_REJECTED_AT_MOST = 16
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LEVELS = {"aot": "", "fx": ", second level"}


class Bypasses:
    """Counts the graphs of one session that are not cached, and warns of each reason once.

    A reason is a warning, with the way out, when it is first met. After that, and once there were
    as many warnings as a log can bear, it is a line at level INFO. Any thread may use it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._warned: set[tuple[str, str]] = set()

    def met(
        self,
        reasons: Sequence[BypassReason],
        error: Exception | None = None,
        *,
        what: str = "a graph is not cached as a whole",
    ) -> None:
        """Count a graph that is not cached for ``reasons``, and log them.

        Args:
            error: what led to it, for reason ``error``: a mistake of ours needs its traceback.
        """
        self._engine.count_bypass({reason.code for reason in reasons})
        shown = reasons[:_SHOWN_AT_MOST]
        with self._mutex:
            room = len(self._warned) < _WARNED_AT_MOST
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
    """Gives the engine a record of each lookup. What goes wrong in it is logged once."""

    def __init__(self, engine: Engine, keys: KeySeam) -> None:
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
        """Show the block in torch's traces, with what it puts into the mapping, if any is made."""
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
    ) -> None:
        """A lookup under ``key`` came to ``outcome``.

        Args:
            saved_s, of_whole: see :class:`Record`.
            rejected: says of each entry that was not used what it lacks: asked on a miss alone.
        """
        is_hit = isinstance(outcome, Hit)
        ending = in_words(outcome)
        if not is_hit:
            logger.debug("miss %s (%s%s)", key, ending["reason"], _LEVELS.get(level, ""))
        if not self._engine.settings.record:
            return
        if level == "aot":
            self._hint(outcome)
        try:
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
                    rejected=() if is_hit else tuple(map(_in_words, rejected[:_REJECTED_AT_MOST])),
                    components={
                        name: (each.digest, each.value) for name, each in known.components.items()
                    },
                    parts={} if is_hit else known.parts,
                )
            )
        except Exception as exc:  # noqa: BLE001 - no training run ends for a record
            self._fail(exc)

    def saved(self, key: str, size: int, elapsed_s: float, compile_s: float) -> None:
        """What had taken ``compile_s`` to compile was saved, and the save took ``elapsed_s``."""
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
        """A graph was not looked up for ``reasons``, or not saved under the key that missed."""
        if not self._engine.settings.record:
            return
        try:
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
        except Exception as exc:  # noqa: BLE001 - no training run ends for a record
            self._fail(exc)

    def _hint(self, outcome: Hit | Miss) -> None:
        """Say once where to ask: of the first graph that is absent where others hit."""
        if isinstance(outcome, Hit):
            self._has_hit = True
        elif self._has_hit and not self._has_hinted and outcome.reason is Reason.ABSENT:
            self._has_hinted = True
            logger.info("a graph missed where others hit; `s3cache explain` says why")

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger_of("records").warning("lookups are not recorded", exc_info=error)


def _in_words(why: Callable[[], list[str]]) -> str:
    words = ""
    with contextlib.suppress(Exception):  # what an entry has guards on may not be here at all
        words = "; ".join(why())
    return words or "what it relies on does not hold"


def in_words(outcome: Hit | Miss) -> dict[str, str]:
    """How a lookup ended, and where or why."""
    if isinstance(outcome, Hit):
        return {"outcome": "hit", "reason": outcome.tier}
    return {"outcome": "miss", "reason": str(outcome.reason)}


def users_line() -> tuple[str, int, str] | None:
    """File, line and function that called what is compiled now: the first one outside of torch.

    Users' backends are between our caller and Dynamo: what they called is none of it.
    """
    compiler, torchs = _places()
    found = None
    frame = sys._getframe(1)
    for _ in range(_FRAMES_AT_MOST):
        name = frame.f_code.co_filename
        if name.startswith(compiler):
            found = None
        elif found is None and not name.startswith(torchs) and not _is_nowhere(name):
            found = name, frame.f_lineno, frame.f_code.co_name
        if frame.f_back is None:
            break
        frame = frame.f_back
    return found


@functools.cache
def _places() -> tuple[str, tuple[str, ...]]:
    torch = internals.torch_directory()
    stdlib = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    # The frames of the standard library that may be in between.
    between = (stdlib + "contextlib.py", stdlib + "functools.py", stdlib + "threading.py")
    return os.path.join(torch, "_dynamo") + os.sep, (torch, _OURS, *between)


def _is_nowhere(name: str) -> bool:
    return name.startswith("<") and name not in ("<stdin>", "<string>")


_TRACED = re.compile(r'File "([^"\n]+)", line (\d+), in [^\n]*(?:\n\s+([^\n]*))?')


def line_of(gm: GraphModule, reason: BypassReason) -> str:
    """The line of the user's program that the reason's node is of, as ``file:line: code``."""
    module = gm.get_submodule(reason.module) if reason.module else gm
    for node in getattr(getattr(module, "graph", None), "nodes", ()):
        if node.name == reason.node:
            traced = _TRACED.findall(str(node.meta.get("stack_trace") or ""))
            if traced:
                file, line, code = traced[-1]
                return f"{file}:{line}: {code.strip()}".rstrip(": ")
    return ""
