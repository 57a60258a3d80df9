"""Record what a process compiles and does not cache; count and log bypasses and failures."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from s3cache.cache import Engine
from s3cache.errors import code_of
from s3cache.graph import BypassReason, Code
from s3cache.hooks._state import Patches, around, users_line
from s3cache.records import Record
from s3cache.stats import EntryKind
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function
from s3cache.util.logs import logger_of
from s3cache.util.text import command, pointer

if TYPE_CHECKING:
    from torch.fx import GraphModule

logger, bypasses = logger_of("records"), logger_of("bypasses")

_MAX_SHOWN = 10  # reasons of one graph
_MAX_WARNED = 50  # reasons of one session
_TRACED = re.compile(r'File "([^"\n]+)", line (\d+), in [^\n]*(?:\n\s+([^\n]*))?')


class Bypasses:
    """Counts, records and logs bypasses and failures. Any thread may use it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._mutex = engine, threading.Lock()
        self._warned: set[tuple[Code | str, str]] = set()
        self._failed: set[str] = set()

    def record(
        self,
        kind: EntryKind,
        reasons: Sequence[BypassReason],
        gm: GraphModule | None = None,
        *,
        key: str = "",
    ) -> None:
        """Record a graph that was not looked up, or was not saved after a miss under ``key``."""
        if not self._engine.settings.record:
            return
        try:
            record = Record(
                kind=kind,
                outcome="bypass",
                key=key,
                reason=" ".join(dict.fromkeys(reason.code for reason in reasons)),
                time=time.time(),
                where=users_line(),
                reasons=tuple({**each.as_dict(), "line": _line_of(gm, each)} for each in reasons),
            )
            self._engine.record(record)
        except Exception:  # a failed record must not end the program
            logger.debug("a graph is not recorded", exc_info=True)

    def warn(
        self,
        reasons: Sequence[BypassReason],
        error: Exception | None = None,
        *,
        what: str = "a graph is not cached as a whole",
    ) -> None:
        """Count a graph that is not cached for ``reasons``, and log them.

        The first occurrence of a reason is a warning, with the fix. Later ones, and all after the
        first 50 warnings, are at level INFO. ``error`` is behind the reason ``error``: a bug of
        ours needs a traceback.
        """
        self._engine.count_bypass({reason.code for reason in reasons})
        shown = reasons[:_MAX_SHOWN]
        new: set[tuple[Code | str, str]] = set()
        with self._mutex:
            # Strict mode raises it instead.
            if len(self._warned) < _MAX_WARNED and not self._engine.settings.strict:
                new = {(reason.code, reason.target) for reason in shown} - self._warned
                self._warned |= new
        lines = [f"{what} ({shown[0].code}): {shown[0]}"]
        for index, reason in enumerate(shown):
            if index:
                lines.append(f"  and ({reason.code}): {reason}")
            if reason.fix:  # on its own line, so that users can paste it
                lines.append(f"    {reason.fix}")
        if len(reasons) > len(shown):
            lines.append(f"  and {len(reasons) - len(shown)} more")
        codes = {reason.code: 0 for reason in shown if (reason.code, reason.target) in new}
        if codes:
            lines.append(f"    read on: {command(*codes)}")
        level, cause = logging.WARNING if new else logging.INFO, error if "error" in codes else None
        bypasses.log(level, "%s", "\n".join(lines), exc_info=cause)

    def note(
        self, what: str, reasons: Sequence[BypassReason], error: Exception | None = None
    ) -> None:
        """Count an FX graph that the second level does not cache, and log why."""
        self._engine.count_bypass({reason.code for reason in reasons}, "fx")
        if error is not None:
            self.warn_of_failure(bypasses, f"{what} at the second level", error)
        else:
            bypasses.info("%s at the second level: %s", what, "; ".join(map(str, reasons)))

    def warn_of_failure(self, log: logging.Logger, what: str, error: Exception) -> None:
        """Warn of the first failure of each kind; strict mode raises it instead."""
        with self._mutex:
            is_new = what not in self._failed
            self._failed.add(what)
        if is_new and not self._engine.settings.strict:
            log.warning("%s %s", what, pointer(code_of(error)), exc_info=error)


def _line_of(gm: GraphModule | None, reason: BypassReason) -> str:
    """Return the line of the user's program that caused a reason, as ``file:line: code``."""
    module = gm.get_submodule(reason.module) if gm is not None and reason.module else gm
    for node in getattr(getattr(module, "graph", None), "nodes", ()):
        if node.name == reason.node:
            traced = _TRACED.findall(str(node.meta.get("stack_trace") or ""))
            if traced:
                file, line, code = traced[-1]
                return f"{file}:{line}: {code.strip()}".rstrip(": ")
    return ""


class Progress:
    """Records when a process starts and stops compiling, and graph breaks. Any thread may compile.

    It is there if :data:`s3cache.settings.WATCHED` is set.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._mutex = engine, threading.Lock()
        self._compiling = self._breaks = 0

    def install(self, patches: Patches) -> None:
        """Begin, perhaps inside the first compile, which imports torch's compiler."""
        patches.install(self)
        self._engine.record({"compiling": False, "at": time.time()})

    @around(internals.while_compiling)
    @contextlib.contextmanager
    def _while_compiling(
        self, original: Function[AbstractContextManager[None]], *args: object, **kwargs: object
    ) -> Iterator[None]:
        with self._counted(), original(*args, **kwargs):
            yield

    # Dynamo does not say that it compiles ahead of time, nor Inductor that it is called alone.
    @around(internals.compile_fx)
    def _compile_fx(self, original: Function[object], *args: object, **kwargs: object) -> object:
        with self._counted():
            return original(*args, **kwargs)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._count_compiles(1)
        try:
            yield
        finally:
            self._count_compiles(-1)

    def _count_compiles(self, added: int) -> None:
        with self._mutex, contextlib.suppress(Exception):  # a failed note must not end the program
            before, self._compiling = self._compiling, self._compiling + added
            if not (before and self._compiling):
                self._engine.record({"compiling": bool(self._compiling), "at": time.time()})
            if added < 0:
                reasons = internals.graph_break_reasons.get()
                if len(reasons) < self._breaks:  # the program has reset Dynamo
                    self._breaks = 0
                for reason in reasons[self._breaks :]:
                    self._engine.record({"graph_break": internals.describe_break(reason)})
                self._breaks = len(reasons)
