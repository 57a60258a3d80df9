"""The report of what of a program can be cached: of :func:`s3cache.check` and ``s3cache check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from s3cache.graph._results import BypassReason, Component, cached_at
from s3cache.util.pages import footer
from s3cache.util.words import code, counted, printable, table, text


class _Printer(Protocol):
    """What IPython passes to ``_repr_pretty_``."""

    def text(self, text: str, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph that ``torch.compile`` compiles, or would compile.

    Attributes:
        nodes: how many it has; 0 where that is not known.
        key: the key it would be looked up under, or ``None`` if it has none.
        components: what the key is made of.
        reasons: why it cannot be cached as a whole; empty if it can.
        entry: what the cache that is enabled has under the key: ``local`` or ``remote``, or the
            reason why nothing would be used, such as ``absent`` or ``untrusted (1 unsigned)``;
            ``None`` where there is no cache or no key.
        where: file, line and function that called what was compiled, if known.
        times: how often it was compiled, or looked up, by all processes of the program.
    """

    nodes: int
    key: str | None
    components: Mapping[str, Component]
    reasons: tuple[BypassReason, ...]
    entry: str | None = None
    where: tuple[str, int, str] | None = None
    times: int = 1

    @property
    def cacheable(self) -> bool:
        """Whether it can be cached as a whole."""
        return not self.reasons

    @property
    def in_halves(self) -> bool:
        """Whether, if not as a whole, its FX graphs are shared at the second level."""
        return bool(self.reasons) and not any(reason.blocks_fx_level for reason in self.reasons)

    @property
    def verdict(self) -> str:
        """Its level and why, its key, and what the cache has under the key, in one line."""
        codes = dict.fromkeys(reason.code for reason in self.reasons)
        why = f" ({', '.join(codes)})" if codes else f", key {self.key}"
        verdict = cached_at(codes) + why
        return verdict if self.entry is None else f"{verdict}, {self.entry}"

    @property
    def origin(self) -> str:
        """Its size, the line that called it and how often, as far as they are known."""
        where = "{}:{} in {}".format(*self.where) if self.where else ""
        times = f"{self.times} times" if self.times > 1 else ""
        nodes = counted(self.nodes, "node") if self.nodes else ""
        return ", ".join(filter(None, (nodes, where, times)))

    def as_dict(self) -> dict[str, object]:
        """Return the graph as plain data."""
        return {
            "nodes": self.nodes,
            "cacheable": self.cacheable,
            "in_halves": self.in_halves,
            "key": self.key,
            "entry": self.entry,
            "components": {
                name: {"digest": component.digest, "value": component.value}
                for name, component in self.components.items()
            },
            "reasons": [reason.as_dict() for reason in self.reasons],
            "where": self.where,
            "times": self.times,
        }


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where Dynamo ends one graph and begins the next."""

    reason: str
    where: str


@dataclass(frozen=True, slots=True)
class Report:
    """What :func:`s3cache.check`, or ``s3cache check``, found.

    Attributes:
        graphs: in the order in which they were compiled.
        breaks: where Dynamo ended one graph and began the next, and why.
        complete: whether everything that was compiled is here.
        program: how the program that ``s3cache check`` ran ended: ``end``, ``exit_code`` and
            ``steps``; empty for :func:`s3cache.check`.
    """

    graphs: tuple[Graph, ...]
    breaks: tuple[GraphBreak, ...]
    complete: bool = True
    program: Mapping[str, object] = field(default_factory=dict)

    @property
    def cacheable(self) -> bool:
        """Whether there is something to cache, and all of it can be."""
        return bool(self.graphs) and all(graph.cacheable for graph in self.graphs)

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain data."""
        return {
            "cacheable": self.cacheable,
            **self.program,
            "complete": self.complete,
            "graphs": [graph.as_dict() for graph in self.graphs],
            "breaks": [{"reason": place.reason, "where": place.where} for place in self.breaks],
        }

    def _repr_pretty_(self, printer: _Printer, _: bool) -> None:
        """Show it in IPython at a terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show it in a notebook."""
        rows = [
            [
                text(f"graph {index}"),
                text(graph.origin),
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
        return f"{good} of {counted(len(self.graphs), 'graph')} can be cached"

    def __str__(self) -> str:
        return "\n".join(map(printable, self._lines()))

    def _lines(self) -> Iterator[str]:
        yield self._summary()
        for index, graph in enumerate(self.graphs):
            yield f"graph {index}: {', '.join(filter(None, (graph.origin, graph.verdict)))}"
            for reason in graph.reasons:
                yield f"  {reason} [{reason.code}]"
                if reason.fix:
                    yield f"    fix: {reason.fix}"
        for place in self.breaks:
            yield f"graph break at {place.where}: {place.reason}"
        if not self.complete:
            yield "there were more lookups than are recorded of one process"
        if more := footer(reason.code for graph in self.graphs for reason in graph.reasons):
            yield more
