"""``s3cache.check``: which graphs of a function can be cached.

Only the hook for keys is installed. torch traces the function as usual; instead of a lookup, the
key of the graph is computed and the graph runs uncompiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
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
