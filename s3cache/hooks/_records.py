"""What is told of each lookup to its record, for ``s3cache explain``."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from s3cache._logs import logger_of
from s3cache.cache import Engine, Hit, Miss
from s3cache.graph import Unsafe
from s3cache.hooks._events import Events
from s3cache.hooks._keys import KeySeam
from s3cache.records import Event, Record
from s3cache.stats import Level, Reason
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["Recording", "in_words"]

logger = logger_of("lookups")

_FRAMES_AT_MOST = 1000
# Under one key there may be any number of entries, of which these say enough.
_REJECTED_AT_MOST = 16
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LEVELS = {"aot": "", "fx": ", second level"}


class Recording:
    """Gives the engine a record of each lookup; what goes wrong in it is told once, and no more.

    Attributes:
        events: shows lookups among torch's own events.
    """

    def __init__(self, engine: Engine, keys: KeySeam, events: Events) -> None:
        self.events = events
        self._engine = engine
        self._keys = keys
        self._failed = False
        self._has_hit = False
        self._has_hinted = False

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
                    rejected=() if is_hit else tuple(map(_told, rejected[:_REJECTED_AT_MOST])),
                    components={
                        name: (each.digest, each.value) for name, each in known.components.items()
                    },
                    parts={} if is_hit else known.parts,
                )
            )
        except Exception as exc:  # noqa: BLE001 - nobody's training is to end for a record
            self._fail(exc)

    def saved(self, key: str, size: int, elapsed_s: float, compile_s: float) -> None:
        """What had taken ``compile_s`` to compile was saved, and the save took ``elapsed_s``."""
        now = time.time()
        self._engine.record(Event("compile", now - elapsed_s, compile_s, key))
        self._engine.record(Event("save", now, elapsed_s, key, size))

    def bypassed(
        self, level: Level, reasons: Sequence[Unsafe], gm: GraphModule | None, *, key: str = ""
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
        except Exception as exc:  # noqa: BLE001 - nobody's training is to end for a record
            self._fail(exc)

    def _hint(self, outcome: Hit | Miss) -> None:
        """Say once where to ask: of the first graph that nobody has saved where others hit."""
        if isinstance(outcome, Hit):
            self._has_hit = True
        elif self._has_hit and not self._has_hinted and outcome.reason is Reason.ABSENT:
            self._has_hinted = True
            logger.info("a graph missed where others hit; `s3cache explain` says why")

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger_of("records").warning("lookups are not recorded", exc_info=error)


def _told(why: Callable[[], list[str]]) -> str:
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


def line_of(gm: GraphModule, reason: Unsafe) -> str:
    """The line of the user's program that the reason's node is of, as ``file:line: code``."""
    module = gm.get_submodule(reason.module) if reason.module else gm
    for node in getattr(getattr(module, "graph", None), "nodes", ()):
        if node.name == reason.node:
            traced = _TRACED.findall(str(node.meta.get("stack_trace") or ""))
            if traced:
                file, line, code = traced[-1]
                return f"{file}:{line}: {code.strip()}".rstrip(": ")
    return ""
