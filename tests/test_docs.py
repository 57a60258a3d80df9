"""The documentation agrees with the code and with itself."""

from __future__ import annotations

import ast
import json
import re
from importlib.metadata import metadata

import pytest
import yaml

from benchmarks.render import COMMANDS, fill, render
from infra.docs import metrics, reasons
from infra.docs.settings import updated
from s3cache.stats import Reason
from s3cache.torch_api import internals
from tests.support.pages import ROOT

BENCHMARKS = ROOT / "docs" / "benchmarks.md"


def test_the_page_of_settings_is_up_to_date() -> None:
    """``make docs-settings`` brings it up to date."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert updated(page) == page


def test_the_page_of_metrics_is_up_to_date() -> None:
    """``make docs-settings`` brings it up to date."""
    page = metrics.PAGE.read_text(encoding="utf-8")
    assert metrics.updated(page) == page
    with pytest.raises(ValueError, match="not exactly one block"):
        metrics.updated("no block")


@pytest.mark.parametrize("name", reasons.tables())
def test_the_tables_of_reasons_and_errors_are_up_to_date(name: str) -> None:
    """``make docs-settings`` brings them up to date."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert reasons.updated(page, reasons.tables()[name]) == page


def test_the_command_corrects_defaults_adds_new_settings_and_removes_old_ones() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    row = "| `local_max_files` | `50000` | the same for their number |\n"
    assert row in page
    assert updated(page.replace("`50000`", "`5`")) == page
    assert updated(page.replace(row, f"{row}| `bygone` | none | of before |\n")) == page
    assert "| `local_max_files` | `50000` | |\n" in updated(page.replace(row, ""))


def test_every_reason_is_documented() -> None:
    text = (ROOT / "docs" / "storage.md").read_text(encoding="utf-8")
    assert [str(reason) for reason in Reason if f"`{reason}`" not in text] == []


# -- the threat model


THREATS = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py::\w+)`", THREATS)))


@pytest.mark.parametrize("name", NAMED)
def test_each_test_in_the_threat_model_exists(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert function in {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def test_each_attack_has_a_test_or_is_marked_as_successful() -> None:
    attacks = THREATS.partition("## Attacks")[2].partition("## What entries say")[0]
    rows = re.findall(r"^\|(?! attack|---)(.+)\|$", attacks, re.MULTILINE)
    assert len(rows) >= 40
    for row in rows:
        _, happens, shown_by = row.split("|")
        assert "::test_" in shown_by or "**" in happens, row


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_benchmarks_shows_the_measured_results(name: str) -> None:
    page = BENCHMARKS.read_text(encoding="utf-8")
    results = ROOT / "docs" / "benchmarks" / f"{name}.json"
    if results.exists():
        text = render(json.loads(results.read_text(encoding="utf-8")), COMMANDS[name])
        assert fill(page, name, text) == page
    else:
        assert f"Not measured yet: `{COMMANDS[name]}`" in page


def test_benchmarks_that_did_not_run_are_shown_as_not_run() -> None:
    bar = {"what": "ratio", "bound": "at most", "limit": 2}
    bars = [bar | {"value": value, "met": met} for value, met in ((None, None), (3.0, False))]
    result = {"title": "Starts", "columns": [], "rows": [], "notes": ["Not run."], "bars": bars}
    lines = render({"results": [result]}, "make bench").splitlines()
    assert [line for line in lines if line] == [
        "### Starts",
        "Not run.",
        "ratio: at most 2 asked: not run.",
        "ratio: 3; at most 2 asked: **missed**.",
    ]


# -- claims about versions


def test_ci_runs_each_claimed_python_and_torch_release() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    classifiers = "\n".join(metadata("torch-s3cache").get_all("Classifier") or [])
    claimed = re.findall(r":: Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    assert jobs["test"]["strategy"]["matrix"]["python"] == claimed
    versions = jobs["torch"]["strategy"]["matrix"]["torch"]
    (major, oldest), (_, newest) = internals.OLDEST, internals.NEWEST
    expected = [f"{major}.{minor}" for minor in range(oldest, newest + 1)]
    assert [version.rpartition(".")[0] for version in versions] == expected
