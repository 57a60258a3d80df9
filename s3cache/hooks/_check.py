"""What of a program can be cached, before it runs for real.

The key seam alone, in a program that torch traces as ever: where torch would look a graph up, it is
keyed, and goes on uncompiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from s3cache._notebooks import code, table, text
from s3cache._pages import footer
from s3cache.graph import Component, Unsafe, remember_pristine
from s3cache.hooks._keys import CacheCall, CacheCalls, KeySeam, Registry
from s3cache.hooks._patching import Patches
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.nn import Module

    from s3cache.torch_api.protocols import AOTConfig, Function

__all__ = ["Graph", "GraphBreak", "Report", "checked"]


class Printer(Protocol):
    """What IPython writes what it shows with."""

    def text(self, text: str, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph that ``torch.compile`` would compile.

    Attributes:
        nodes: how many it has.
        key: the key it would be looked up under, or ``None`` if it has none.
        components: what the key is made of.
        reasons: why it cannot be cached as a whole; empty if it can.
        entry: what the cache that is enabled has under the key: ``local`` or ``remote``, or the
            reason why nothing would be used, such as ``absent`` or ``untrusted (1 unsigned)``;
            ``None`` where there is no cache or no key.
    """

    nodes: int
    key: str | None
    components: dict[str, Component]
    reasons: tuple[Unsafe, ...]
    entry: str | None = None

    @property
    def cacheable(self) -> bool:
        """Whether it can be cached as a whole."""
        return not self.reasons

    @property
    def in_halves(self) -> bool:
        """Whether, if not as a whole, its forward and backward are shared by themselves."""
        return bool(self.reasons) and not any(reason.in_any_form for reason in self.reasons)

    @property
    def verdict(self) -> str:
        """The key or the level and why, and what the cache has under the key, in words."""
        codes = ", ".join(dict.fromkeys(reason.code for reason in self.reasons))
        verdict = f"key {self.key}" if self.cacheable else f"cannot be cached ({codes})"
        if self.in_halves:
            verdict = f"cached at the second level only ({codes})"
        return verdict if self.entry is None else f"{verdict}, {self.entry}"


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

    def as_dict(self) -> dict[str, object]:
        """The report as plain data."""
        return {
            "cacheable": self.cacheable,
            "graphs": [
                {
                    "nodes": graph.nodes,
                    "cacheable": graph.cacheable,
                    "in_halves": graph.in_halves,
                    "key": graph.key,
                    "entry": graph.entry,
                    "components": {
                        name: {"digest": component.digest, "value": component.value}
                        for name, component in graph.components.items()
                    },
                    "reasons": [reason.as_dict() for reason in graph.reasons],
                }
                for graph in self.graphs
            ],
            "breaks": [{"reason": place.reason, "where": place.where} for place in self.breaks],
        }

    def _repr_pretty_(self, printer: Printer, _: bool) -> None:
        """What IPython shows at a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        rows = [
            [
                text(f"graph {index}"),
                text(f"{graph.nodes} nodes"),
                text(graph.verdict),
                "".join(
                    text(f"{reason} [{reason.code}]") + (code(reason.fix) or "<br>")
                    for reason in graph.reasons
                ),
            ]
            for index, graph in enumerate(self.graphs)
        ]
        rows += [
            [text("graph break"), text(place.where), text(place.reason), ""]
            for place in self.breaks
        ]
        return table(self._summary(), ["", "", "verdict", "why not, and what to do"], rows)

    def _summary(self) -> str:
        good = sum(graph.cacheable for graph in self.graphs)
        return f"{good} of {len(self.graphs)} graphs can be cached"

    def __str__(self) -> str:
        lines = [self._summary()]
        for index, graph in enumerate(self.graphs):
            lines.append(f"graph {index}: {graph.nodes} nodes, {graph.verdict}")
            for reason in graph.reasons:
                lines.append(f"  {reason} [{reason.code}]")
                if reason.fix:
                    lines.append(f"    {reason.fix}")
        for place in self.breaks:
            lines.append(f"graph break at {place.where}: {place.reason}")
        if more := footer(reason.code for graph in self.graphs for reason in graph.reasons):
            lines.append(more)
        return "\n".join(lines)


def checked(
    function: Function[object],
    registry: Registry,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    inquire: Callable[[str], str] | None = None,
) -> Report:
    """See :func:`s3cache.check`.

    Args:
        inquire: says what there is under a key.
    """
    import torch

    watch = _Watch(registry)
    remember_pristine(early=False)
    # What is compiled already keeps the options that it was given.
    compiled = function if _is_compiled(function) else torch.compile(function)
    torch.compiler.reset()
    try:
        with watch.installed():
            _call(compiled, args, kwargs)
        breaks = tuple(
            GraphBreak(**internals.told_break(reason))
            for reason in internals.graph_break_reasons.get()
        )
    finally:
        torch.compiler.reset()  # none of the callables made here may run again
    if inquire is None:
        return Report(tuple(watch.graphs), breaks)
    asked = (
        graph if graph.key is None else replace(graph, entry=inquire(graph.key))
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
        self._calls = CacheCalls()
        self._keys = KeySeam(registry, self._calls)
        self.graphs: list[Graph] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        patches = Patches()
        try:
            self._keys.install(patches)
            # Asked even where torch's caches are off: that is one of the reasons to report.
            patches.replace(internals.should_use_local_cache, lambda _: lambda: True)
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
        with self._calls.entered(CacheCall()) as call:
            try:
                key = internals.name_of_key(mod, args, aot_config, others)
                graph = Graph(nodes, key, dict(self._keys.components(key)), ())
            except Exception as exc:  # noqa: BLE001 - it is what is asked for
                graph = Graph(nodes, None, {}, call.reasons or (Unsafe("error", repr(exc)),))
        self.graphs.append(graph)
        return internals.loaded(_eagerly(mod), aot_config)


def _eagerly(mod: Module) -> Callable[[Sequence[object]], object]:
    graph = getattr(mod, "graph", None)
    count = len(graph.find_nodes(op="placeholder")) if graph is not None else None

    def run(inputs: Sequence[object]) -> object:
        # A graph module that holds its parameters takes those from itself, not from the list.
        return mod(*(inputs if count is None else inputs[len(inputs) - count :]))

    return run
