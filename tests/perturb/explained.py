"""Is what was changed what the explanation of a miss names?"""

from __future__ import annotations

import collections
import random
import re
from collections.abc import Iterable, Mapping
from typing import Any

from s3cache import Difference, Graph, Report
from s3cache.insight import differences
from s3cache.records import Record
from tests.perturb.changes import all_bases, all_changes
from tests.perturb.program import Change, Program, report_of

__all__ = ["explained", "sample"]

# In which components a change of a family can be, by how they begin; of others in any.
_GRAPH, _INPUTS = ("gm", "graph."), ("example_inputs", "inputs.")
_WHERE = {
    "argument": (*_GRAPH, *_INPUTS),
    "body": (*_GRAPH, *_INPUTS),
    "constant": (*_GRAPH, *_INPUTS),
    "dynamic": (*_GRAPH, *_INPUTS),
    "input": (*_GRAPH, *_INPUTS),
    "sharing": (*_GRAPH, *_INPUTS),
}

# What says that something differs, and not what.
_VAGUE = re.compile(r"words do not show|graph: the same code")


def explained(bases: Mapping[str, Program], changes: Iterable[Change]) -> dict[str, Any]:
    """How many changes miss, and of how many of these the explanation does not name what changed.

    Returns:
        ``missed`` and ``named``, counts by family; ``unnamed``, the changes with what is said.
    """
    known: dict[str, Report] = {}
    missed: dict[str, int] = collections.Counter()
    named: dict[str, int] = collections.Counter()
    unnamed = []
    for change in changes:
        try:
            if change.base not in known:
                known[change.base] = report_of(bases[change.base])
            found = report_of(change.program)
        except Exception:
            continue
        base = known[change.base]
        keys = {graph.key for graph in base.graphs}
        for graph in found.graphs:
            if graph.key is None or graph.key in keys or not base.graphs[0].key:
                continue
            missed[change.family] += 1
            said = [
                each
                for each in differences(_nearest(base, graph), _described(graph))
                if not each.follows
            ]
            if _names(change, said):
                named[change.family] += 1
            elif report_of(bases[change.base]).graphs[0].key in (graph.key, None):
                missed[change.family] -= 1  # the process is another one than it was
                del known[change.base]
            else:
                unnamed.append(f"{change}: {[each.text for each in said]}")
            break
    return {"missed": dict(missed), "named": dict(named), "unnamed": unnamed}


def sample(count: int) -> dict[str, Any]:
    """The same of ``count`` changes, always the same ones and some of each family."""
    everything = all_changes()
    chosen: list[Change] = []
    for family in sorted({each.family for each in everything}):
        members = [each for each in everything if each.family == family]
        share = max(3, count * len(members) // len(everything))
        chosen += random.Random(family).sample(members, min(share, len(members)))
    return explained(all_bases(), chosen)


def _nearest(base: Report, graph: Graph) -> Record:
    def common(of: Graph) -> int:
        mine = graph.components
        return sum(name in mine and mine[name] == one for name, one in of.components.items())

    return _described(max((each for each in base.graphs if each.key), key=common))


def _described(graph: Graph) -> Record:
    of = graph.components.items()
    return Record(
        "aot",
        "miss",
        components={name: (one.digest, one.value) for name, one in of},
        parts={name: one.parts for name, one in of if one.parts},
    )


def _names(change: Change, said: list[Difference]) -> bool:
    """Whether one of them says what was changed, and none is of something else alone."""
    clear = [each for each in said if not _VAGUE.search(each.text)]
    if change.family == "config":
        option, _, value = change.name.partition("=")
        option = option.rpartition(".")[2]
        return any(option in each.text or f"→ {value}" in each.text for each in clear)
    if where := _WHERE.get(change.family):
        clear = [each for each in clear if each.component.startswith(where)]
    shape = re.match(r"(\d+)x(\d+)$", change.name)
    if change.family == "input" and shape is not None and change.base != "dynamic":
        return any(f"→ ({shape[1]}, {shape[2]})" in each.text for each in clear)
    return bool(clear)
