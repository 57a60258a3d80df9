"""How far a program is, for who watches it from outside: ``s3cache warm`` and ``s3cache check``.

Where they have set :data:`s3cache.settings.WATCHED` a process notes in its records, beside its
lookups, when it begins and ends to compile, the steps of its optimizers, where Dynamo breaks a
graph, and what torch would not even look up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from s3cache._logs import logger_of
from s3cache.cache import Engine
from s3cache.graph import unsafe_process
from s3cache.hooks._patching import Patches
from s3cache.hooks._records import Recording
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from collections.abc import Callable

    from s3cache.torch_api.protocols import Function

__all__ = ["STEPS_AT_MOST", "Progress"]

logger = logger_of("records")

#: Later steps are not noted: a run's records are bounded.
STEPS_AT_MOST = 1000


class Progress:
    """Notes what one process does. Any thread may compile, or step an optimizer."""

    def __init__(self, engine: Engine, recording: Recording) -> None:
        self._engine = engine
        self._recording = recording
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
            except Exception:  # nobody's training is to end for a note
                logger.debug("graph breaks are not noted", exc_info=True)

    def _note_breaks(self) -> None:
        reasons = internals.graph_break_reasons.get()
        if len(reasons) < self._breaks:  # the program has had Dynamo forget
            self._breaks = 0
        for reason in reasons[self._breaks :]:
            self._engine.note(graph_break=internals.told_break(reason))
        self._breaks = len(reasons)

    def _asker(self, original: Callable[[], bool]) -> Callable[[], bool]:
        def should_use_local_autograd_cache() -> bool:
            answer = original()
            if not (answer or any(internals.tiers_asked("aot"))):
                try:
                    self._recording.bypassed("aot", unsafe_process(), None)
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
            if before > self._done or self._done >= STEPS_AT_MOST:
                return
            done = min(self._steps.values())
            if done != self._done:
                self._done = done
                self._engine.note(steps=done)
