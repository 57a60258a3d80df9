"""What two machines' results for an operator say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

__all__ = ["Verdict", "report", "verdict"]

Verdict: TypeAlias = Literal["hit", "bypassed", "no-graph", "not-compilable", "wrong", "missed"]


def verdict(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Judge an operator by what the machine that compiled it and the one that hit it found.

    * ``hit``: every graph was saved, hit and not compiled again, and the results are equal
    * ``bypassed``: a graph was refused, and the results are equal
    * ``no-graph``: nothing of it was compiled
    * ``not-compilable``: torch has no sample, fails, or cannot compile it
    * ``missed``, ``wrong``: what must not be
    """
    if first["status"] not in ("compiled", "inaccurate"):
        same = second["status"] == first["status"]
        return ("not-compilable" if same else "wrong"), f"{first['status']}: {first['why']}"
    if second["status"] != first["status"] or not second["equal"]:
        why = second["why"] or "the results of the two machines differ"
        return "wrong", f"{second['status']}: {why}"
    saved, hit = first["counts"], second["counts"]
    if saved["bypassed"] or hit["bypassed"]:
        return "bypassed", " ".join(first["reasons"])
    shared = saved["saved"] + saved["hits"]
    if not first["lowered"] and not shared:
        return "no-graph", ""
    if hit["hits"] == shared and not second["lowered"] and not hit["misses"]:
        return "hit", "" if first["status"] == "compiled" else f"inaccurate: {first['why']}"
    return "missed", f"{shared} graphs shared, {hit['hits']} hit, {second['lowered']} compiled"


def report(verdicts: Mapping[str, tuple[Verdict, str]]) -> list[str]:
    """Lines that say how many came to what, and what was not expected."""
    counts = Counter(found for found, _ in verdicts.values())
    lines = [f"{count:5} {name}" for name, count in counts.most_common()]
    reasons = Counter(why for found, why in verdicts.values() if found == "bypassed")
    lines += [f"{count:5} bypassed: {why}" for why, count in reasons.most_common()]
    bad = {name: each for name, each in verdicts.items() if each[0] in ("wrong", "missed")}
    return lines + [f"{name}: {found}: {why}" for name, (found, why) in sorted(bad.items())]
