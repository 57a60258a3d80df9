"""Report why graphs are not cached, check a function, and watch the progress of a process.

``s3cache.check`` installs the hook for keys only. torch traces the function as usual; instead of a
lookup, the key of the graph is computed and the graph runs uncompiled. The commands ``check`` and
``warm`` watch a normal process, which records its progress.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from s3cache.cache import Engine
from s3cache.errors import code_of
from s3cache.graph import (
    BypassReason,
    Code,
    Graph,
    GraphBreak,
    Report,
    take_baseline,
)
from s3cache.hooks._calls import CacheCall, users_line
from s3cache.hooks._keys import CompileState, KeyHook, Patches, Registry, around
from s3cache.records import Record
from s3cache.stats import EntryKind
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of
from s3cache.util.text import command, pointer

if TYPE_CHECKING:
    from torch.fx import GraphModule
    from torch.nn import Module

    from s3cache.torch_api.protocols import AOTConfig, Function

logger, bypasses = logger_of("records"), logger_of("bypasses")

_MAX_SHOWN = 10  # reasons of one graph
_MAX_WARNED = 50  # reasons of one session
_TRACED = re.compile(r'File "([^"\n]+)", line (\d+), in [^\n]*(?:\n\s+([^\n]*))?')


class Bypasses:
    """Counts, records and logs bypasses and failures. Any thread may use it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._warned: set[tuple[Code, str]] = set()
        self._failed: set[str] = set()

    def record(
        self,
        level: EntryKind,
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
                level=level,
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
        first 50 warnings, are lines at level INFO. ``error`` is the exception behind the reason
        ``error``: a bug of ours needs a traceback.
        """
        self._engine.count_bypass({reason.code for reason in reasons})
        shown = reasons[:_MAX_SHOWN]
        new: set[tuple[Code, str]] = set()
        with self._mutex:
            # Strict mode raises it instead.
            if len(self._warned) < _MAX_WARNED and not self._engine.settings.strict:
                new = {(each.code, each.target) for each in shown} - self._warned
                self._warned |= new
        lines = [f"{what} ({shown[0].code}): {shown[0]}"]
        for index, reason in enumerate(shown):
            if index:
                lines.append(f"  and ({reason.code}): {reason}")
            if reason.fix:  # on its own line, so that users can paste it
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

    def note(
        self, what: str, reasons: Sequence[BypassReason], error: Exception | None = None
    ) -> None:
        """Count an FX graph that the second level does not cache, and log why."""
        self._engine.count_bypass({reason.code for reason in reasons}, "fx")
        if error is not None:
            self.failed(bypasses, f"{what} at the second level", error)
        else:
            why = "; ".join(map(str, reasons))
            bypasses.info("%s at the second level: %s", what, why)

    def failed(self, log: logging.Logger, what: str, error: Exception) -> None:
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


def checked(
    function: Function[object],
    registry: Registry,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    probe: Callable[[str], str] | None = None,
) -> Report:
    """Return the report of :func:`s3cache.check`; ``probe`` looks a key up in the cache."""
    import torch

    # Nothing is compiled, so that replaced functions of torch might still run in a compile.
    state, graphs = CompileState(observed=contextlib.nullcontext), []
    keys = KeyHook(registry, state)

    def load(
        _: Function[object],
        mod: Module,
        inputs: Sequence[object],
        config: AOTConfig,
        *others: object,
        **__: object,
    ) -> object:
        """Replace AOTAutograd's cache: every lookup returns the graph itself."""
        nodes = len(internals.graph_module_of(mod).graph.nodes)
        internals.stand_in_for_metadata()
        with state.entered(CacheCall()) as call:
            try:
                key = internals.name_of_key(mod, inputs, config, others)
                components = dict(keys.known(key).components)
                if not components:
                    raise KeyError(key)  # a key that torch made up
                graphs.append(Graph(nodes, key, components, ()))
            except Exception as exc:  # noqa: BLE001 - the report says it
                reasons = call.reasons or (BypassReason("error", repr(exc)),)
                graphs.append(Graph(nodes, None, {}, reasons))
        return internals.as_load_result(_eagerly(mod), config)

    take_baseline(early=False)
    # A compiled function keeps its own options.
    is_compiled = isinstance(function, internals.optimized_module.get()) or hasattr(
        function, internals.ORIGINAL_CALLABLE
    )
    compiled = function if is_compiled else torch.compile(function)
    torch.compiler.reset()
    grad, patches = torch.is_grad_enabled(), Patches()
    try:
        patches.install(state)
        patches.install(keys)
        # Also if torch's caches are off: the report names that as a reason.
        patches.wrap(internals.should_use_local_cache, lambda _: True)
        patches.wrap(internals.try_load, load)
        compiled(*args, **kwargs)
        breaks = tuple(
            GraphBreak(**internals.describe_break(reason))
            for reason in internals.graph_break_reasons.get()
        )
    except BaseException:
        torch.set_grad_enabled(grad)  # a graph that raises may leave it changed
        raise
    finally:
        patches.close()
        torch.compiler.reset()  # the callables made here must not run again
    asked = (
        graph if probe is None or graph.key is None else replace(graph, entry=probe(graph.key))
        for graph in graphs
    )
    return Report(tuple(asked), breaks)


def _eagerly(mod: Module) -> Callable[[Sequence[object]], object]:
    graph = getattr(mod, "graph", None)
    count = len(graph.find_nodes(op="placeholder")) if graph is not None else None

    def run(inputs: Sequence[object]) -> object:
        # A graph module with its own parameters does not take them from the list.
        return mod(*(inputs if count is None else inputs[len(inputs) - count :]))

    return run


class Progress:
    """Records the progress of a process if :data:`s3cache.settings.WATCHED` is set.

    It records when the process starts and stops compiling, and graph breaks. Any thread may
    compile.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._compiling = 0
        self._breaks = 0

    def install(self, patches: Patches) -> None:
        """Begin, perhaps inside the first compile, which imports torch's compiler."""
        patches.install(self)
        self._engine.record({"compiling": False, "at": time.time()})

    @around(internals.while_compiling)
    @contextlib.contextmanager
    def _while_compiling(
        self, original: Function[AbstractContextManager[None]], *args: object, **kwargs: object
    ) -> Iterator[None]:
        self._count_compiles(1)
        try:
            with original(*args, **kwargs):
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
