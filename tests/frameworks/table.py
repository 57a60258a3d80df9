"""The table of docs/frameworks.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.frameworks.catalog import Program

__all__ = ["table"]

_COLUMNS = (
    "framework",
    "program",
    "hits: graphs + FX graphs",
    "misses",
    "bypasses",
    "lowered",
    "compilers",
    "losses",
    "same disk: lowered, torch alone",
    "seconds, cold → elsewhere",
)


def table(programs: Mapping[str, Program], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: one row for each program, whatever came of it."""
    rows = [_COLUMNS, ["---"] * len(_COLUMNS)]
    rows += [_row(program, results[name]) for name, program in programs.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    whys = [
        f"- {program.framework}, {program.does}: {program.shortfall.why}"
        for program in programs.values()
        if program.shortfall.why
    ]
    notes = ["", "Not warm yet:", "", *whys] if whys else []
    releases = sorted({found["torch"] for found in results.values() if "torch" in found})
    measured = ["", f"Measured by `make test-frameworks` with torch {', '.join(releases)}.", ""]
    return "\n".join([*lines, *notes, *measured])


def _row(program: Program, found: Mapping[str, Any]) -> list[str]:
    if "trials" not in found:
        why = found.get("skipped", "**failed**" if "failed" in found else "not run")
        return [program.framework, program.does, why, *[""] * (len(_COLUMNS) - 3)]
    trials = found["trials"]
    # With --quick only one of these two runs, and no second process anywhere.
    second = trials.get("second") or trials["third"]
    lowered = [trials[what]["lowered"] for what in ("first again", "alone again") if what in trials]
    equal = len({tuple(trial["losses"]) for trial in trials.values()}) == 1
    return [
        f"{program.framework} {found['version']}",
        program.does,
        f"{second['hits']} + {second['half_hits']}",
        _by_reason(second["misses"]),
        _by_reason(second["reasons"]),
        str(second["lowered"]),
        str(second["compilers"]),
        "equal" if equal else "**differ**",
        ", ".join(map(str, lowered)) or "not run",
        f"{trials['first']['seconds']:.0f} → {second['seconds']:.0f}",
    ]


def _by_reason(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} `{reason}`" for reason, count in sorted(counts.items())) or "0"
