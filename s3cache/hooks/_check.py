"""What of a program can be cached, before it runs for real."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from s3cache.graph._key import Component, Key
from s3cache.graph._safety import Unsafe
from s3cache.hooks._keying import Keying, reasons_of
from s3cache.hooks._patching import Patches
from s3cache.hooks._registry import Registry
from s3cache.hooks._versions import loaded, name_of_key

__all__ = ["Graph", "GraphBreak", "Report", "checked"]


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph that ``torch.compile`` would compile.

    Attributes:
        nodes: how many it has.
        key: the key it would be looked up under, or ``None`` if it has none.
        components: what the key is made of.
        reasons: why it cannot be cached; empty if it can.
    """

    nodes: int
    key: str | None
    components: dict[str, Component]
    reasons: tuple[Unsafe, ...]

    @property
    def cacheable(self) -> bool:
        """Whether it can be cached."""
        return not self.reasons


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where Dynamo ends one graph and begins the next."""

    reason: str
    where: str


@dataclass(frozen=True, slots=True)
class Report:
    """What :func:`s3cache.check` found."""

    graphs: tuple[Graph, ...]
    breaks: tuple[GraphBreak, ...]

    @property
    def cacheable(self) -> bool:
        """Whether there is something to cache, and all of it can be."""
        return bool(self.graphs) and all(graph.cacheable for graph in self.graphs)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "cacheable": self.cacheable,
            "graphs": [
                {
                    "nodes": graph.nodes,
                    "cacheable": graph.cacheable,
                    "key": graph.key,
                    "components": {
                        name: {"digest": each.digest, "value": each.value}
                        for name, each in graph.components.items()
                    },
                    "reasons": [reason.as_dict() for reason in graph.reasons],
                }
                for graph in self.graphs
            ],
            "breaks": [{"reason": each.reason, "where": each.where} for each in self.breaks],
        }

    def __str__(self) -> str:
        good = sum(graph.cacheable for graph in self.graphs)
        lines = [f"{good} of {len(self.graphs)} graphs can be cached"]
        for index, graph in enumerate(self.graphs):
            verdict = f"key {graph.key}" if graph.cacheable else "cannot be cached"
            lines.append(f"graph {index}: {graph.nodes} nodes, {verdict}")
            for reason in graph.reasons:
                lines.append(f"  {reason} [{reason.code}]")
                if reason.fix:
                    lines.append(f"    {reason.fix}")
        for each in self.breaks:
            lines.append(f"graph break at {each.where}: {each.reason}")
        return "\n".join(lines)


def checked(
    function: Callable[..., Any], registry: Registry, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Report:
    """See :func:`s3cache.check`."""
    import torch
    from torch._dynamo.utils import graph_break_reasons

    watch = _Watch(registry)
    # What is compiled already keeps the options that it was given.
    compiled = function if _is_compiled(function) else torch.compile(function)
    torch._dynamo.reset()
    try:
        with watch.installed():
            _called(compiled, args, kwargs)
        breaks = tuple(
            GraphBreak(_one_line(each.reason), _where(each)) for each in graph_break_reasons
        )
    finally:
        torch._dynamo.reset()  # none of the callables made here may run again
    return Report(tuple(watch.graphs), breaks)


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A graph that raises half-way would leave grad mode as it was there."""
    import torch

    grad = torch.is_grad_enabled()
    try:
        function(*args, **kwargs)
    except BaseException:
        torch.set_grad_enabled(grad)
        raise


def _is_compiled(function: Any) -> bool:
    import torch

    return isinstance(function, torch._dynamo.OptimizedModule) or hasattr(
        function, "_torchdynamo_orig_callable"
    )


class _Watch:
    """Takes the place of AOTAutograd's cache: each graph is a hit, on the graph itself."""

    def __init__(self, registry: Registry) -> None:
        self._keying = Keying(registry, self._made)
        self._keys: dict[str, Key] = {}
        self.graphs: list[Graph] = []

    def _made(self, name: str, key: Key) -> None:
        self._keys[name] = key

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        from torch._functorch import aot_autograd
        from torch._functorch._aot_autograd import autograd_cache

        patches = Patches()
        try:
            self._keying.install(patches, autograd_cache)
            # Asked even where torch's caches are off: that is one of the reasons to report.
            patches.set(aot_autograd, "should_use_local_autograd_cache", lambda: True)
            load = self._loader(autograd_cache)
            patches.set(autograd_cache.AOTAutogradCache, "try_load", staticmethod(load))
            yield
        finally:
            patches.undo()

    def _loader(self, module: Any) -> Callable[..., Any]:
        def try_load(mod: Any, args: Any, aot_config: Any, *rest: Any, **kwargs: Any) -> Any:
            try:
                name = name_of_key(module, mod, args, aot_config, rest)
                key, components = name, dict(self._keys[name].components)
                reasons: tuple[Unsafe, ...] = ()
            except Exception as exc:  # noqa: BLE001 - it is what is asked for
                key, components = None, {}
                reasons = tuple(reasons_of(exc)) or (Unsafe("error", repr(exc)),)
            gm = getattr(mod, "gm", mod)
            self.graphs.append(Graph(len(gm.graph.nodes), key, components, reasons))
            return loaded(_eagerly(mod), aot_config)

        return try_load


def _eagerly(mod: Any) -> Callable[[list[Any]], Any]:
    graph = getattr(mod, "graph", None)
    count = len(graph.find_nodes(op="placeholder")) if graph is not None else None

    def run(inputs: list[Any]) -> Any:
        # A graph module that holds its parameters takes those from itself, not from the list.
        return mod(*(inputs if count is None else inputs[len(inputs) - count :]))

    return run


def _one_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _where(reason: Any) -> str:
    stack = reason.user_stack
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown place"
