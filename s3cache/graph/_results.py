"""Results of this package besides keys: bypass reasons, and the report of a check."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Literal, TypeAlias

from s3cache.graph._describe import Component
from s3cache.graph._origin import origin_of, value_at
from s3cache.torch_api import internals
from s3cache.util.text import counted, footer, printable

Code: TypeAlias = Literal[
    "caches-off",  # the process
    "fx-graph-cache-off",
    "freezing",
    "fakify-first-call",
    "constant-folding",
    "bisecting",
    "custom-pass",
    "custom-callable",
    "config",
    "function",  # the graph
    "method",
    "module",
    "higher-order-op",
    "node-kind",
    "checkpoint-context",
    "custom-operator",
    "override",
    "generator",
    "subclass",
    "frozen-parameters",
    "backward-state",  # its inputs
    "input",
    "component",
    "entry",  # the compiled graph
    "unrecorded",
    "kernel",
    "torch",  # a reason of torch
    "error",  # a failure
]

# Reasons that also apply to the FX graphs of a graph.
_BLOCKS_FX_LEVEL = {"caches-off", "fx-graph-cache-off", "constant-folding", "bisecting", "config"}
_BLOCKS_FX_LEVEL |= {"custom-pass", "generator", "higher-order-op", "input", "error"}


@dataclass(frozen=True, slots=True)
class BypassReason:
    """One reason why a graph cannot be cached.

    Attributes:
        code: the kind of reason, stable over releases: a ``Code``, or one that a feature declares.
        message: the problem.
        fix: how a user can fix it.
        node: name of the graph's node, or ``""`` for the graph as a whole.
        target: the qualified name of the node's target.
        module: the (sub)graph of the node, ``""`` for the outermost.
        line: of the program, if a report knows it.
    """

    code: Code | str
    message: str
    fix: str = ""
    node: str = ""
    target: str = ""
    module: str = ""
    line: str = ""

    @property
    def blocks_fx_level(self) -> bool:
        """Whether FX graphs of the graph cannot be cached either, as far as we know."""
        return self.code in _BLOCKS_FX_LEVEL

    def __str__(self) -> str:
        where = self.line or f"{self.module}.{self.node}".strip(".")
        return f"{where}: {self.message}" if where else self.message

    def as_dict(self) -> dict[str, str]:
        """Return all attributes as plain data."""
        return asdict(self)


def cached_at(codes: Iterable[str]) -> str:
    """Return in words at which level a graph with reasons of these codes is cached."""
    reasons = {*codes}
    if not reasons:
        return "cached at the first level"
    is_shared = reasons.isdisjoint(_BLOCKS_FX_LEVEL)
    return "cached at the second level only" if is_shared else "cannot be cached"


#: What a user can do about code that no key can describe.
OUTSIDE: Final = "call it outside of the compiled region"

#: A component, its text, or None if it is empty; or all reasons against a key.
Finding: TypeAlias = "Component | str | list[BypassReason] | None"


def suggested_fix(target: object, condition: str = "if it depends on its inputs alone") -> str:
    """Return Python to paste that registers ``target``; or an alternative in words."""
    module = str(getattr(target, "__module__", None) or "")
    name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", ""))
    if module.startswith(internals.COMPILED_AUTOGRAD):
        return (
            "run that backward outside of compiled autograd: torch makes this function while it "
            "captures the backward pass, so it cannot be registered"
        )
    if module.startswith("torch.") and "<locals>" in name:
        return (
            "call a custom operator or plain functions instead: for each call of a function with "
            "allow_in_graph or nonstrict_trace, torch makes a new function"
        )
    if not module or not name:  # an object
        return suggested_fix(type(target), condition)
    code = target if isinstance(target, (types.FunctionType, type)) else type(target)
    if module.partition(".")[0] == "torch" and origin_of(code).kind == "torch":
        return f"{OUTSIDE}: this code is torch's own"
    is_found = value_at(module, name) is target
    if isinstance(target, types.FunctionType) and hasattr(target, "__wrapped__") and not is_found:
        # functools.wraps copied the names of another function.
        module, name = str(target.__globals__.get("__name__")), target.__code__.co_name
        is_found = value_at(module, name) is target
    plain = name.rpartition(".")[2]
    if not plain.isidentifier():
        plain = "your_function"
    is_main = module == "__main__"  # other modules cannot import it from there
    imported = "import s3cache" if is_main else f"import s3cache, {module}"
    at = ("" if is_main else f"{module}.") + (name if is_found else plain)
    register = f"{imported}; s3cache.register_cacheable({at}, version='1')  # {condition}"
    first = "" if is_found else f"define {plain} at the top level of {module}, then: "
    return first + register


def fix_or(otherwise: str, *targets: object) -> str:
    """Return ``otherwise``, after the fix for the first target that can be registered."""
    for target in targets:
        if hasattr(target, "__qualname__"):
            return suggested_fix(target, f"if it depends on its inputs alone; or {otherwise}")
    return otherwise


# -- the report of s3cache.check and of `s3cache check`


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph that ``torch.compile`` compiles, or would compile.

    Attributes:
        nodes: the number of nodes; 0 if unknown.
        key: the key for its lookup, or ``None`` if it has none.
        components: the components of the key.
        reasons: why it cannot be cached as a whole; empty if it can.
        entry: the result of a lookup in the enabled cache: ``local`` or ``remote``, or the reason
            of a miss, such as ``absent`` or ``untrusted (1 unsigned)``; ``None`` without a cache
            or a key.
        where: file, line and function of the call, if known.
        times: how often it was compiled or looked up, by all processes of the program.
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
        """Whether it is not cached as a whole, but its FX graphs are, at the second level."""
        return bool(self.reasons) and not any(reason.blocks_fx_level for reason in self.reasons)

    @property
    def summary(self) -> str:
        """Its size, line and number of calls, its level with reasons or key, and its entry."""
        codes = dict.fromkeys(reason.code for reason in self.reasons)
        parts = [
            counted(self.nodes, "node") if self.nodes else "",
            "{}:{} in {}".format(*self.where) if self.where else "",
            f"{self.times} times" if self.times > 1 else "",
            cached_at(codes) + (f" ({', '.join(codes)})" if codes else f", key {self.key}"),
            self.entry or "",
        ]
        return ", ".join(filter(None, parts))

    def as_dict(self) -> dict[str, object]:
        """Return the graph as plain data."""
        plain = ("nodes", "cacheable", "in_halves", "key", "entry", "where", "times")
        parts = self.components.items()
        return {
            **{name: getattr(self, name) for name in plain},
            "components": {n: {"digest": each.digest, "value": each.value} for n, each in parts},
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place where Dynamo ends one graph and begins the next."""

    reason: str
    where: str


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """The result of :func:`s3cache.check`, or of ``s3cache check``.

    Attributes:
        graphs: in the order of their compiles.
        breaks: graph breaks, with their reasons.
        complete: whether the report has all graphs.
        program: for ``s3cache check``, how the program ended: ``end`` and ``exit_code``; empty for
            :func:`s3cache.check`.
    """

    graphs: tuple[Graph, ...]
    breaks: tuple[GraphBreak, ...]
    complete: bool = True
    program: Mapping[str, object] = field(default_factory=dict)

    @property
    def cacheable(self) -> bool:
        """Whether there are graphs, and all of them can be cached."""
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

    def __str__(self) -> str:
        return "\n".join(map(printable, self._lines()))

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        good = sum(graph.cacheable for graph in self.graphs)
        yield f"{good} of {counted(len(self.graphs), 'graph')} can be cached"
        for index, graph in enumerate(self.graphs):
            yield f"graph {index}: {graph.summary}"
            for reason in graph.reasons:
                yield f"  {reason} [{reason.code}]"
                if reason.fix:
                    yield f"    fix: {reason.fix}"
        for place in self.breaks:
            yield f"graph break at {place.where}: {place.reason}"
        if not self.complete:
            yield "there were more lookups than one process records"
        if more := footer(reason.code for graph in self.graphs for reason in graph.reasons):
            yield more
