"""The text of a graph of plain nodes: all that ``Graph.python_code`` says, in a tenth of its time.

Nearly all nodes call something of torch's on other nodes and on constants. A graph with anything
else in it is left to torch, whose code names what it calls, imports it, and knows many kinds of
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import Graph, Node

__all__ = ["plain_text"]


def plain_text(graph: Graph) -> str | None:
    """A line for each node; ``None`` if one of them is not plain.

    Two plain graphs have one text if and only if torch generates the same code for both.
    """
    if not internals.has_plain_codegen(graph):
        return None
    constants, containers = internals.plain_arguments()
    words: dict[int, str | None] = {}  # the same few functions are called over and over

    def are_plain(values: Iterable[object]) -> bool:
        for value in values:
            kind = type(value)
            if kind in constants:
                continue
            if kind is slice:
                value = (value.start, value.stop, value.step)  # type: ignore[attr-defined]
            elif kind not in containers:
                return False
            elif isinstance(value, dict):
                value = (*value, *value.values())
            if not are_plain(value):  # type: ignore[arg-type]
                return False
        return True

    lines = []
    for node in graph.nodes:
        target = node.target
        if type(target) is not str:
            if id(target) not in words:
                words[id(target)] = internals.name_in_code(target)
            target = words[id(target)]
        annotation = _annotation(node)
        if target is None or annotation is None or internals.WRAPPED in node.meta:
            return None
        if not are_plain(node.args) or not are_plain(node.kwargs.values()):
            return None
        if node.name in _ROOTS:  # as which the line could be read
            return None
        lines.append(f"{node.name}{annotation} = {_line(node, target)}")
    return "\n".join(lines)


_ROOTS = frozenset(("torch", "builtins", "operator", "_operator", "self"))


def _line(node: Node, target: str) -> str:
    """As code, for people who compare two: what is called, or whence it comes, on what."""
    args = [repr(each) for each in node.args]
    args += [f"{name}={each!r}" for name, each in node.kwargs.items()]
    if node.op == "call_function":
        return f"{target}({', '.join(args)})"
    if node.op == "call_method":
        return f"{args[0]}.{target}({', '.join(args[1:])})"
    if node.op == "call_module":
        return f"self.{target}({', '.join(args)})"
    if node.op == "get_attr":
        return f"self.{target}"
    return f"{node.op} {target}({', '.join(args)})"


def _annotation(node: Node) -> str | None:
    if node.type is None:
        return ""
    name = internals.name_in_code(node.type) if isinstance(node.type, type) else None
    return None if name is None else f": {name}"
