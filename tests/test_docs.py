"""The documentation agrees with the code and with itself."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import MISSING, Field, fields
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.render import COMMANDS, fill, render
from infra.docs import metrics, reasons
from infra.docs.settings import updated
from s3cache.settings import Settings
from s3cache.stats import Reason
from s3cache.store import FileLocation, S3Options, parse_url
from s3cache.torch_api import internals

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "infra" / "README.md"]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \|", re.MULTILINE)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for variable in (
        "URL",
        *(each.name.upper() for of in (Settings, S3Options) for each in fields(of)),
    ):
        monkeypatch.delenv(f"S3CACHE_{variable}", raising=False)


def rows() -> list[tuple[str, str]]:
    """Name and default of each row in the page's tables."""
    return ROW.findall((ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"))


def documented(name: str) -> str | None:
    """The default that the page gives: the text in backticks, or ``None`` for the word none."""
    found = [default for each, default in rows() if each == name]
    assert len(found) == 1, f"{name} has {len(found)} rows in docs/configuration.md"
    if found[0] == "none":
        return None
    assert re.fullmatch(r"`[^`]+`", found[0]), f"{name}: {found[0]!r} is neither `text` nor none"
    return found[0].strip("`")


@pytest.mark.parametrize("setting", fields(Settings), ids=lambda each: each.name)
def test_every_setting_is_documented_with_its_default(setting: Field[Any]) -> None:
    text = documented(setting.name)
    if setting.name == "local_dir":
        text = str(Path(text or "").expanduser())
    given: dict[str, Any] = {setting.name: text}
    settings, _ = Settings.load(**given)
    assert getattr(settings, setting.name) == getattr(Settings(), setting.name)
    assert (text is None) == (getattr(Settings(), setting.name) is None)


@pytest.mark.parametrize("option", fields(S3Options), ids=lambda each: each.name)
def test_every_s3_option_is_documented_with_its_default(option: Field[Any]) -> None:
    if option.default is MISSING:
        assert (option.name, "required") in rows()
    elif option.default in (None, ""):
        assert documented(option.name) is None
    else:
        given: dict[str, Any] = {option.name: documented(option.name)}
        said = parse_url("s3://bucket", **given)
        assert getattr(said, option.name) == option.default


def test_nothing_else_is_documented() -> None:
    known = {each.name for of in (Settings, S3Options, FileLocation) for each in fields(of)}
    assert {name for name, _ in rows()} == known - {"path"}


def test_the_page_of_settings_is_as_its_command_makes_it() -> None:
    """``make docs-settings`` brings it up to date."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert updated(page) == page


def test_the_page_of_metrics_is_as_its_command_makes_it() -> None:
    """``make docs-settings`` brings it up to date."""
    page = metrics.PAGE.read_text(encoding="utf-8")
    assert metrics.updated(page) == page
    with pytest.raises(ValueError, match="not exactly one block"):
        metrics.updated("no block")


@pytest.mark.parametrize("name", reasons.tables())
def test_the_tables_of_reasons_and_errors_are_as_their_command_makes_them(name: str) -> None:
    """``make docs-settings`` brings them up to date."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert reasons.updated(page, reasons.tables()[name]) == page


def test_every_reason_is_documented() -> None:
    text = (ROOT / "docs" / "storage.md").read_text(encoding="utf-8")
    assert [str(reason) for reason in Reason if f"`{reason}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s:]*#[^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        text = ((page.parent / file) if file else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings]
        assert anchor in slugs, target


# -- the threat model


THREATS = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py::\w+)`", THREATS)))


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_the_threat_model_names_exists(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert function in {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def test_every_attack_names_a_test_or_says_that_it_succeeds() -> None:
    attacks = THREATS.partition("## Attacks")[2].partition("## What entries say")[0]
    rows = re.findall(r"^\|(?! attack|---)(.+)\|$", attacks, re.MULTILINE)
    assert len(rows) >= 40
    for row in rows:
        _, happens, shown_by = row.split("|")
        assert "::test_" in shown_by or "**" in happens, row


@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_page_shows_is_what_was_measured(name: str) -> None:
    page = BENCHMARKS.read_text(encoding="utf-8")
    results = ROOT / "docs" / "benchmarks" / f"{name}.json"
    if results.exists():
        text = render(json.loads(results.read_text(encoding="utf-8")), COMMANDS[name])
        assert fill(page, name, text) == page
    else:
        assert f"Not measured yet: `{COMMANDS[name]}`" in page


# -- what is claimed is tested


def test_ci_runs_each_python_and_each_release_of_torch_that_is_claimed() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    classifiers = "\n".join(metadata("torch-s3cache").get_all("Classifier") or [])
    claimed = re.findall(r":: Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    assert jobs["test"]["strategy"]["matrix"]["python"] == claimed
    versions = jobs["torch"]["strategy"]["matrix"]["torch"]
    (major, oldest), (_, newest) = internals.OLDEST, internals.NEWEST
    expected = [f"{major}.{minor}" for minor in range(oldest, newest + 1)]
    assert [version.rpartition(".")[0] for version in versions] == expected
