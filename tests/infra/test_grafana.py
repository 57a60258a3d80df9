"""The dashboard queries existing metrics, and all but a few of them."""

from __future__ import annotations

import json
import re

import pytest

from s3cache.metrics import FAMILIES, Family
from tests.support.pages import ROOT

DASHBOARD = json.loads((ROOT / "infra" / "grafana" / "s3cache.json").read_text(encoding="utf-8"))
# Labels that Prometheus adds to each sample.
_ADDED = {"instance", "job"}
_NOT_SHOWN = {
    "s3cache.downloads": "their bytes are shown, and lookups that hit the remote",
    "s3cache.request.size": "the sizes of uploads and downloads are shown",
}


def samples_of(family: Family) -> dict[str, set[str]]:
    """Return the labels of each kind of sample, by its name in Prometheus."""
    labels, name = {*family.labels, *_ADDED}, family.prometheus_name
    if family.kind == "histogram":
        bucket = {f"{name}_bucket": labels | {"le"}}
        return {f"{name}_sum": labels, f"{name}_count": labels, **bucket}
    return {name + ("_total" if family.kind == "counter" else ""): labels}


EXPOSED = {name: labels for family in FAMILIES for name, labels in samples_of(family).items()}
EXPRESSIONS = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]


def names_in(expression: str) -> set[str]:
    return {*re.findall(r"\bs3cache_\w+", expression)}


@pytest.mark.parametrize(
    ("expression", "legend"), [pytest.param(e, text, id=f"{t}: {e}") for t, e, text in EXPRESSIONS]
)
def test_an_expression_uses_existing_metrics_and_labels(expression: str, legend: str) -> None:
    """Each metric selects a job; a label that separates lines is in their legend."""
    assert names_in(expression)
    for name, matchers in re.findall(r"\b(s3cache_\w+)(?:\{([^}]*)\})?", expression):
        matched = {*re.findall(r"(\w+)\s*[=!]", matchers)}
        assert "job" in matched, name
        assert matched <= EXPOSED[name], name
    for group in re.findall(r"\bby\s*\(([^)]*)\)", expression):
        for label in {*re.findall(r"\w+", group)} - {"le"}:
            assert all(label in EXPOSED[name] for name in names_in(expression))
            assert f"{{{{{label}}}}}" in legend, f"{label} separates the lines"


def test_the_dashboard_shows_all_metrics_but_the_listed_ones() -> None:
    shown = {name for _, expression, _ in EXPRESSIONS for name in names_in(expression)}
    missing = {family.name for family in FAMILIES if not shown & samples_of(family).keys()}
    assert missing == _NOT_SHOWN.keys()
