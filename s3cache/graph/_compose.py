"""The whole key of a graph, or every reason why it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from s3cache.graph._details import details_components
from s3cache.graph._inputs import graph_components, input_components
from s3cache.graph._key import Component, Key
from s3cache.graph._machine import machine_components
from s3cache.graph._operators import operator_component, registrations
from s3cache.graph._pickled import Pickled
from s3cache.graph._safety import Unsafe

__all__ = ["key_of"]


def key_of(
    details: Any, pickler: Any, *, vouched: Callable[[Any], str | None]
) -> Key | list[Unsafe]:
    """Digest torch's details of a graph, and what torch leaves out.

    Args:
        details: torch's ``AOTAutogradCacheDetails`` (or a later torch's like of it).
        pickler: torch's pickler for keys.
        vouched: the version of a function, operator or module that the user vouched for.
    """
    pickled = Pickled(pickler)
    components, unsafe = details_components(details, pickled)
    components.update(machine_components())
    if details.gm is not None:
        components.update(graph_components(details.gm, pickled))
        operators, unknown = operator_component(details.gm, vouched)
        unsafe += unknown
        if operators is not None:
            components["graph.operators"] = operators
        if versions := _versions(details.gm, vouched):
            components["graph.vouched"] = Component.of_text(versions)
    components.update(input_components(details.example_inputs))
    if (user := registrations()) is not None:
        components["torch.registrations"] = user
    return unsafe or Key(components)


def _versions(gm: Any, vouched: Callable[[Any], str | None]) -> str:
    import torch

    found = set()
    for module in gm.modules():
        called = [type(module)]
        if isinstance(module, torch.fx.GraphModule):
            called = [n.target for n in module.graph.nodes if n.op == "call_function"]
        for each in called:
            if (version := vouched(each)) is not None:
                found.add(f"{each.__module__}.{each.__name__}={version}")
    return " ".join(sorted(found))
