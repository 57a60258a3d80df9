"""Note how far a process is, for ``s3cache warm`` and ``check``, which watch it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from s3cache.cache import Engine
from s3cache.graph import process_bypass_reasons
from s3cache.hooks._state import Patches
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from s3cache.hooks._recorder import LookupLog
    from s3cache.torch_api.protocols import Function

logger = logger_of("records")

# Later steps are not noted: a run's records are bounded.
_MAX_STEPS = 1000


class Progress:
    """Notes what a process does, in its records, where :data:`s3cache.settings.WATCHED` is set.

    That is when it begins and ends to compile, the steps of its optimizers, where Dynamo breaks a
    graph, and what torch would not even look up. Any thread may compile, or step an optimizer.
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
        """Begin, perhaps inside the first compile: it is what imports torch's compiler."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        patches.wrap(internals.while_compiling, self._while_compiling)
        patches.wrap(internals.should_use_local_cache, self._should_use_local_cache)
        patches.at_undo(register_optimizer_step_post_hook(self._stepped).remove)
        self._engine.note(compiling=False, at=time.time())

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
        with self._mutex:
            before, self._compiling = self._compiling, self._compiling + added
            if not (before and self._compiling):
                self._engine.note(compiling=bool(self._compiling), at=time.time())
            if added < 0:
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

    def _should_use_local_cache(self, original: Callable[[], bool]) -> bool:
        answer = original()
        if not (answer or any(internals.tiers_asked("aot"))):
            try:
                self._lookup_log.bypassed("aot", process_bypass_reasons(), None)
            except Exception:
                logger.debug("a graph is not noted", exc_info=True)
        return answer

    def _stepped(self, optimizer: object, *_: object) -> None:
        """Count ``optimizer.step()``; a step is done once each optimizer has done it."""
        import torch

        if torch.compiler.is_compiling():  # a compiled optimizer is traced as if this were not here
            return
        with self._mutex:
            before = self._steps.get(id(optimizer), 0)
            self._steps[id(optimizer)] = before + 1
            if before > self._done or self._done >= _MAX_STEPS:
                return
            done = min(self._steps.values())
            if done != self._done:
                self._done = done
                self._engine.note(steps=done)
