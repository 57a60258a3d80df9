"""Update the table of docs/metrics.md from :mod:`s3cache.metrics`.

.venv/bin/python -m infra.docs.metrics
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.render import fill
from s3cache.metrics import FAMILIES, Family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
_HEAD = "| OpenTelemetry | Prometheus | | labels | |\n|---|---|---|---|---|\n"


def updated(page: str) -> str:
    """Return ``page`` with a row for each metric."""
    return fill(page, "metrics", _HEAD + "".join(map(_row, FAMILIES)))


def _row(family: Family) -> str:
    total = "_total" if family.kind == "counter" else ""
    labels = ", ".join(f"`{label}`" for label in family.labels)
    names = f"`{family.name}` | `{family.prometheus_name}{total}`"
    return f"| {names} | {family.kind}, {family.unit.strip('{}')} | {labels} | {family.text} |\n"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
