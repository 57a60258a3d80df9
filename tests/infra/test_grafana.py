"""The dashboard asks for metrics that there are, and for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from s3cache.metrics import FAMILIES, Family

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "infra" / "grafana" / "s3cache.json").read_text(encoding="utf-8")
)
# What Prometheus adds to each sample.
_ADDED = {"instance", "job"}
_NOT_SHOWN = {
    "s3cache.downloads": "their bytes are, and lookups that hit the remote",
    "s3cache.request.size": "of uploads and downloads they are",
}


def samples_of(family: Family) -> dict[str, set[str]]:
    """The labels of each kind of sample, by its name as Prometheus has it."""
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


def parsed(expression: str) -> Any:
    for variable, value in {"$__rate_interval": "5m", "$__range": "6h", "$job": ".*"}.items():
        expression = expression.replace(variable, value)
    return promql_parser.parse(expression)


def nodes(node: Any) -> Iterator[Any]:
    """All parts of an expression."""
    yield node
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (below := getattr(node, name, None)) is not None:
            yield from nodes(below)
    for argument in getattr(node, "args", None) or []:
        yield from nodes(argument)


def selectors(expression: str) -> list[Any]:
    found = nodes(parsed(expression))
    return [node for node in found if isinstance(node, promql_parser.VectorSelector)]


@pytest.mark.parametrize(
    ("expression", "legend"), [pytest.param(e, text, id=f"{t}: {e}") for t, e, text in EXPRESSIONS]
)
def test_an_expression_asks_for_what_there_is(expression: str, legend: str) -> None:
    found = selectors(expression)
    assert found
    for selector in found:
        labels = EXPOSED[selector.name]
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels, selector.name
        assert "job" in {matcher.name for matcher in selector.matchers.matchers}
    for node in nodes(parsed(expression)):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            assert {*node.modifier.labels} <= EXPOSED[found[0].name]
            for label in {*node.modifier.labels} - {"le"}:
                assert f"{{{{{label}}}}}" in legend, f"{label} tells the lines apart"


def test_every_metric_is_on_it() -> None:
    shown = {
        selector.name for _, expression, _ in EXPRESSIONS for selector in selectors(expression)
    }
    left = {family.name for family in FAMILIES if not shown & samples_of(family).keys()}
    assert left == _NOT_SHOWN.keys()
