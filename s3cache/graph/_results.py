"""What this package returns beside a key: reasons against one, and the report of a check."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from s3cache.graph._origin import value_at
from s3cache.torch_api import internals
from s3cache.util.text import counted, footer, printable

if TYPE_CHECKING:
    from s3cache.graph._graph import Component

#: Returns the version that the user registered a function, operator, class or module with, if any.
RegisteredVersion: TypeAlias = Callable[[object], "str | None"]

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
    "entry",  # what it was compiled to
    "unrecorded",
    "kernel",
    "target",
    "torch",  # a reason that only torch knows
    "error",  # none at all
]

# Reasons that hold for the FX graphs that a graph is traced into as well.
_BLOCKS_FX_LEVEL: frozenset[Code] = frozenset(
    {
        "caches-off",
        "fx-graph-cache-off",
        "constant-folding",
        "bisecting",
        "custom-pass",
        "config",
        "generator",
        "higher-order-op",
        "input",
        "error",
    }
)


@dataclass(frozen=True, slots=True)
class BypassReason:
    """One reason why a graph cannot be cached.

    Attributes:
        code: the kind of reason, stable over releases.
        message: what is wrong.
        fix: what a user can do about it.
        node: name of the graph's node, or ``""`` for the graph as a whole.
        target: what the node calls, qualified.
        module: the (sub)graph the node is in, ``""`` for the outermost.
        line: of the program, where a report knows it.
    """

    code: Code
    message: str
    fix: str = ""
    node: str = ""
    target: str = ""
    module: str = ""
    line: str = ""

    @property
    def blocks_fx_level(self) -> bool:
        """Whether FX graphs of the graph cannot be cached either, as far as is known."""
        return self.code in _BLOCKS_FX_LEVEL

    def __str__(self) -> str:
        where = self.line or f"{self.module}.{self.node}".strip(".")
        return f"{where}: {self.message}" if where else self.message

    def as_dict(self) -> dict[str, str]:
        """Return all attributes as plain data."""
        return asdict(self)


def cached_at(codes: Iterable[str]) -> str:
    """Return at which level a graph is cached that has reasons of these codes, in words."""
    found = {*codes}
    if not found:
        return "cached at the first level"
    is_shared = found.isdisjoint(_BLOCKS_FX_LEVEL)
    return "cached at the second level only" if is_shared else "cannot be cached"


#: A component, or its text, or nothing to say; or every reason why some code allows no key.
Finding: TypeAlias = "Component | str | list[BypassReason] | None"


def suggested_fix(target: object, condition: str = "if it depends on its inputs alone") -> str:
    """Return the lines of Python that register ``target``, to be pasted; or what to do instead."""
    module = str(getattr(target, "__module__", None) or "")
    name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", ""))
    if module.startswith(internals.COMPILED_AUTOGRAD):
        return (
            "go backward outside of compiled autograd there: torch makes this function as it "
            "captures the backward pass, so it cannot be registered"
        )
    if module.startswith("torch.") and "<locals>" in name:
        return (
            "call a custom operator or plain functions there instead: torch makes a new function "
            "for each call of what allow_in_graph or nonstrict_trace keeps from it"
        )
    if not module or not name:  # an object
        return suggested_fix(type(target), condition)
    is_found = value_at(module, name) is target
    if isinstance(target, types.FunctionType) and hasattr(target, "__wrapped__") and not is_found:
        # functools.wraps gave it the names of what it wraps.
        module, name = str(target.__globals__.get("__name__")), target.__code__.co_name
        is_found = value_at(module, name) is target
    plain = name.rpartition(".")[2]
    plain = plain if plain.isidentifier() else "your_function"
    if module == "__main__":  # no other module can import it from there
        imported, prefix = "import s3cache", ""
    else:
        imported, prefix = f"import s3cache, {module}", f"{module}."
    at = prefix + (name if is_found else plain)
    register = f"{imported}; s3cache.register_cacheable({at}, version='1')  # {condition}"
    return register if is_found else f"define {plain} at the top of {module}, then: {register}"


def qualified_name(target: object) -> str:
    """Return module and name of a function or class, or of the class of an object."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:  # an object: its type says more than an address would
        target = type(target)
        name = target.__qualname__
    return f"{getattr(target, '__module__', None)}.{name}"


# -- the report of s3cache.check and of `s3cache check`


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
        plain = ("nodes", "cacheable", "in_halves", "key", "entry", "where", "times")
        parts = self.components.items()
        return {
            **{name: getattr(self, name) for name in plain},
            "components": {n: {"digest": each.digest, "value": each.value} for n, each in parts},
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Where Dynamo ends one graph and begins the next."""

    reason: str
    where: str


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What :func:`s3cache.check`, or ``s3cache check``, found.

    Attributes:
        graphs: in the order in which they were compiled.
        breaks: where Dynamo ended one graph and began the next, and why.
        complete: whether everything that was compiled is here.
        program: how the program that ``s3cache check`` ran ended: ``end`` and ``exit_code``; empty
            for :func:`s3cache.check`.
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

    def __str__(self) -> str:
        return "\n".join(map(printable, self._lines()))

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        good = sum(graph.cacheable for graph in self.graphs)
        yield f"{good} of {counted(len(self.graphs), 'graph')} can be cached"
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
