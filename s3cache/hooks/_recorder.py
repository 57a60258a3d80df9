"""What people learn of lookups: records, warnings, torch's traces, and why an entry did not fit."""

from __future__ import annotations

import ast
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

from s3cache.cache import Engine, Hit, Miss
from s3cache.graph import BypassReason
from s3cache.hooks._conditions import as_written, failure
from s3cache.hooks._keys import KeyHook
from s3cache.records import Event, Record
from s3cache.stats import Level, Reason
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of
from s3cache.util.text import command

if TYPE_CHECKING:
    from torch.fx import GraphModule

logger, bypasses, records = logger_of("lookups"), logger_of("bypasses"), logger_of("records")

_MAX_SHOWN = 10  # reasons of one graph
_MAX_WARNED = 50  # reasons of one session
_MAX_FRAMES = 1000
_NO_FILE = re.compile(r"<(?!stdin>|string>)")
# Under one key there may be any number of entries, of which these say enough.
_MAX_REJECTED = 16
# Between two lookups a prefetch may end any number of transfers.
_MAX_TRANSFERS = 1024
_FIRST_LANE = 1  # torch's own events are in lane 0
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LEVELS = {"aot": "", "fx": ", second level"}


class Recorder:
    """Records lookups, saves and bypasses of one session, and shows them. Any thread may use it.

    A failure to record is logged once.
    """

    def __init__(self, engine: Engine, keys: KeyHook) -> None:
        self._engine = engine
        self._keys = keys
        self._mutex = threading.Lock()
        self._warned: set[tuple[str, str]] = set()
        self._is_shown = self._failed = self._has_hit = self._has_hinted = False

    def show(self) -> None:
        """Show lookups and saves in torch's traces from now on."""
        self._is_shown = True

    @contextlib.contextmanager
    def shown(self, name: str) -> Iterator[dict[str, object]]:
        """Show the block in torch's traces, if it makes any, with what is put into the mapping.

        That is the log of ``TORCH_TRACE``, and ``torch.profiler``. An error ends no program.
        """
        about: dict[str, object] = {}
        end = None
        if self._is_shown and internals.is_traced():
            with contextlib.suppress(Exception):
                end = internals.begin_event(name, time.time_ns())
        try:
            yield about
        finally:
            if end is not None:
                with contextlib.suppress(Exception):
                    end(time.time_ns(), about)

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

        ``rejected`` are functions that say why each entry was not used: called on a miss alone.
        """
        is_hit = isinstance(outcome, Hit)
        if isinstance(outcome, Hit):
            ending = {"outcome": "hit", "reason": str(outcome.tier)}
        else:
            ending = {"outcome": "miss", "reason": str(outcome.reason)}
            logger.debug("miss %s (%s%s)", key, ending["reason"], _LEVELS.get(level, ""))
        if level == "aot":
            self._hint(outcome)
        known = self._keys.known(key)
        self._record(
            lambda: Record(
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
        gm: GraphModule | None = None,
        *,
        key: str = "",
    ) -> None:
        """Record a graph that was not looked up, or not saved under the key that missed."""
        self._record(
            lambda: Record(
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

    def warn(
        self,
        reasons: Sequence[BypassReason],
        error: Exception | None = None,
        *,
        what: str = "a graph is not cached as a whole",
    ) -> None:
        """Count a graph that is not cached for ``reasons``, and log them.

        A reason is a warning, with the way out, when it first occurs. After that, and once there
        were as many warnings as a log can bear, it is a line at level INFO. ``error`` is what led
        to the reason of that name: a mistake of ours needs its traceback.
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

    def _hint(self, outcome: Hit | Miss) -> None:
        """Point to ``explain`` once, for the first graph that is absent where others hit."""
        if isinstance(outcome, Hit):
            self._has_hit = True
        elif self._has_hit and not self._has_hinted and outcome.reason is Reason.ABSENT:
            self._has_hinted = True
            logger.info("a graph missed where others hit; `s3cache explain` says why")

    def _record(self, make: Callable[[], Record]) -> None:
        if self._engine.settings.record:
            try:
                self._engine.record(make())
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
        elif found is None and not name.startswith(torchs) and not _NO_FILE.match(name):
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


# -- why an entry under the right key did not fit

# How torch names the sizes that are inputs, in the guards of its entries, by number.
_NUMBERED = re.compile(r"L\['t(\d+)'\]")


def failing_guards(expression: str, inputs: Sequence[object]) -> list[str]:
    """Return which of torch's guards on sizes, joined by ``and``, do not hold for ``inputs``."""
    sizes = internals.sizes_among(inputs)
    names = [
        as_written(internals.name_of_size(size) or f"size {i}") for i, size in enumerate(sizes)
    ]
    values = [int(size.node.hint) for size in sizes]  # which guards nothing
    tree = ast.parse(expression.strip(), mode="eval").body
    guards = (
        tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    )
    failures = []
    for guard in map(ast.unparse, guards):
        if not internals.holds_of_sizes(guard, sizes, values):
            numbers = sorted({int(number) for number in _NUMBERED.findall(guard)})
            text = _NUMBERED.sub(lambda match: names[int(match[1])], guard)
            failures.append(failure(text, {names[number]: values[number] for number in numbers}))
    return failures
