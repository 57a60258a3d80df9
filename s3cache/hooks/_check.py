"""``s3cache.check``: find out what of a function can be cached, without compiling it.

It installs the hook of keys alone. torch traces the function as usual; where it would look a graph
up, the graph is keyed and then runs uncompiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from s3cache.graph import BypassReason, Graph, GraphBreak, Report, take_baseline
from s3cache.hooks._keys import KeyHook, Registry
from s3cache.hooks._state import CacheCall, CompileState, Patches
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.nn import Module

    from s3cache.torch_api.protocols import AOTConfig, Function


def checked(
    function: Function[object],
    registry: Registry,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    probe: Callable[[str], str] | None = None,
) -> Report:
    """Return the report of :func:`s3cache.check`.

    Args:
        probe: says what the cache has under a key.
    """
    import torch

    watch = _Watch(registry)
    take_baseline(early=False)
    # What is compiled already keeps the options that it was given.
    compiled = function if _is_compiled(function) else torch.compile(function)
    torch.compiler.reset()
    try:
        with watch.installed():
            _call(compiled, args, kwargs)
        breaks = tuple(
            GraphBreak(**internals.describe_break(reason))
            for reason in internals.graph_break_reasons.get()
        )
    finally:
        torch.compiler.reset()  # none of the callables made here may run again
    if probe is None:
        return Report(tuple(watch.graphs), breaks)
    asked = (
        graph if graph.key is None else replace(graph, entry=probe(graph.key))
        for graph in watch.graphs
    )
    return Report(tuple(asked), breaks)


def _is_compiled(function: object) -> bool:
    return isinstance(function, internals.optimized_module.get()) or hasattr(
        function, internals.ORIGINAL_CALLABLE
    )


def _call(
    function: Function[object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Call it, and restore grad mode: a graph that raises half-way would leave it changed."""
    import torch

    grad = torch.is_grad_enabled()
    try:
        function(*args, **kwargs)
    except BaseException:
        torch.set_grad_enabled(grad)
        raise


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
            self._state.install(patches)
            self._keys.install(patches)
            # Asked even where torch's caches are off: that is one of the reasons to report.
            patches.wrap(internals.should_use_local_cache, lambda _: True)
            patches.replace(internals.try_load, lambda _: self._load)
            yield
        finally:
            patches.undo()

    def _load(
        self,
        mod: Module,
        args: Sequence[object],
        aot_config: AOTConfig,
        *others: object,
        **_: object,
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
