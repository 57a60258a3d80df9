"""Kernels of hits that must still be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from s3cache.records import Run
from s3cache.util.text import printable


def report(runs: Sequence[Run]) -> tuple[Mapping[str, object], Sequence[str]]:
    """Return the kernels, each with the reason: ``left to measure: NAME, 3 configurations``."""
    left = {
        name: why
        for run in runs
        for record in run.records
        for name, why in record.notes.get("left", ())
    }
    lines = [f"left to measure: {printable(f'{name}, {why}')}" for name, why in left.items()]
    return {"left": left}, lines
