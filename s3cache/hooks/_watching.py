"""What ``s3cache.check``, and the commands ``check`` and ``warm``, find out of a program.

``s3cache.check`` installs the hook of keys alone. torch traces the function as usual; where it
would look a graph up, the graph is keyed and then runs uncompiled. The commands watch a process
that runs as usual, and notes how far it is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from s3cache.cache import Engine
from s3cache.graph import (
    BypassReason,
    Graph,
    GraphBreak,
    Report,
    process_bypass_reasons,
    take_baseline,
)
from s3cache.hooks._keys import KeyHook, Registry
from s3cache.hooks._state import CacheCall, CompileState, Patches, around
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from torch.nn import Module

    from s3cache.hooks._recorder import Recorder
    from s3cache.torch_api.protocols import AOTConfig, Function

logger = logger_of("records")

# Later steps are not noted: a run's records are bounded.
_MAX_STEPS = 1000


def checked(
    function: Function[object],
    registry: Registry,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    probe: Callable[[str], str] | None = None,
) -> Report:
    """Return the report of :func:`s3cache.check`; ``probe`` says what the cache has of a key."""
    import torch

    watch = _Watch(registry)
    take_baseline(early=False)
    # What is compiled already keeps the options that it was given.
    is_compiled = isinstance(function, internals.optimized_module.get()) or hasattr(
        function, internals.ORIGINAL_CALLABLE
    )
    compiled = function if is_compiled else torch.compile(function)
    torch.compiler.reset()
    grad = torch.is_grad_enabled()
    try:
        with watch.installed():
            compiled(*args, **kwargs)
        breaks = tuple(
            GraphBreak(**internals.describe_break(reason))
            for reason in internals.graph_break_reasons.get()
        )
    except BaseException:
        torch.set_grad_enabled(grad)  # a graph that raises half-way leaves it changed
        raise
    finally:
        torch.compiler.reset()  # none of the callables made here may run again
    asked = (
        graph if probe is None or graph.key is None else replace(graph, entry=probe(graph.key))
        for graph in watch.graphs
    )
    return Report(tuple(asked), breaks)


class _Watch:
    """Takes the place of AOTAutograd's cache: each graph is a hit, on the graph itself."""

    def __init__(self, registry: Registry) -> None:
        self._state = CompileState()
        self._keys = KeyHook(registry, self._state)
        self.graphs: list[Graph] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        patches = Patches()
        try:
            for hooks in (self._state, self._keys):
                patches.install(hooks)
            # Asked even where torch's caches are off: that is one of the reasons to report.
            patches.wrap(internals.should_use_local_cache, lambda _: True)
            patches.wrap(internals.try_load, self._load)
            yield
        finally:
            patches.undo()

    def _load(
        self,
        _: Function[object],
        mod: Module,
        args: Sequence[object],
        aot_config: AOTConfig,
        *others: object,
        **__: object,
    ) -> object:
        nodes = len(internals.graph_module_of(mod).graph.nodes)
        internals.stand_in_for_metadata()
        with self._state.entered(CacheCall()) as call:
            try:
                key = internals.name_of_key(mod, args, aot_config, others)
                components = dict(self._keys.known(key).components)
                if not components:
                    raise KeyError(key)  # torch made it up
                graph = Graph(nodes, key, components, ())
            except Exception as exc:  # noqa: BLE001 - the report says it
                graph = Graph(nodes, None, {}, call.reasons or (BypassReason("error", repr(exc)),))
        self.graphs.append(graph)
        return internals.loaded(_eagerly(mod), aot_config)


def _eagerly(mod: Module) -> Callable[[Sequence[object]], object]:
    graph = getattr(mod, "graph", None)
    count = len(graph.find_nodes(op="placeholder")) if graph is not None else None

    def run(inputs: Sequence[object]) -> object:
        # A graph module that holds its parameters takes those from itself, not from the list.
        return mod(*(inputs if count is None else inputs[len(inputs) - count :]))

    return run


class Progress:
    """Notes what a process does, in its records, where :data:`s3cache.settings.WATCHED` is set.

    That is when it begins and ends to compile, the steps of its optimizers, where Dynamo breaks a
    graph, and what torch would not even look up. Any thread may compile, or step an optimizer.
    """

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self._engine = engine
        self._recorder = recorder
        self._mutex = threading.Lock()
        self._compiling = 0
        self._steps: dict[int, int] = {}
        self._done = 0
        self._breaks = 0

    def install(self, patches: Patches) -> None:
        """Begin, perhaps inside the first compile: it is what imports torch's compiler."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        patches.install(self)
        patches.at_undo(register_optimizer_step_post_hook(self._stepped).remove)
        self._engine.note(compiling=False, at=time.time())

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

    @around(internals.should_use_local_cache)
    def _should_use_local_cache(self, original: Callable[[], bool]) -> bool:
        answer = original()
        if not (answer or any(internals.tiers_asked("aot"))):
            try:
                self._recorder.bypassed("aot", process_bypass_reasons())
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
