"""The documentation agrees with the code and with itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.render import COMMANDS, fill, render
from infra.docs import asks, events, metrics, reasons
from infra.docs.settings import updated
from s3cache.errors import ConfigError
from s3cache.records import JOB
from s3cache.seam import reasons as all_reasons
from s3cache.settings import Settings
from s3cache.store import STORE_OPTIONS, S3Options, parse_url
from s3cache.torch_api import internals
from s3cache.trust import parse_trusted
from tests.support.pages import ROOT

pytestmark = pytest.mark.needs()

GENERATED: dict[Path, Callable[[str], str]] = {
    ROOT / "docs" / "configuration.md": updated,
    metrics.PAGE: metrics.updated,
    events.PAGE: events.updated,
    asks.PAGE: asks.updated,
    **{
        ROOT / "docs" / name: partial(fill, name="table", text=table)
        for name, table in reasons.tables().items()
    },
}


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_the_generated_part_of_a_page_is_up_to_date(page: Path) -> None:
    """``make docs-settings`` brings it up to date."""
    text = page.read_text(encoding="utf-8")
    assert GENERATED[page](text) == text
    with pytest.raises(ValueError, match=r"block|row"):
        GENERATED[page]("no block")


def test_every_reason_is_documented() -> None:
    text = (ROOT / "docs" / "storage.md").read_text(encoding="utf-8")
    assert [str(reason) for reason in all_reasons() if f"`{reason}`" not in text] == []


# -- the page of the architecture


def test_each_event_has_its_place_on_the_way_of_a_hit_and_a_miss() -> None:
    page = events.PAGE.read_text(encoding="utf-8")
    drawing = page.partition("## The way of a hit and a miss")[2].partition("## What decides")[0]
    drawn = re.findall(r"● (\w+\.\w+)", drawing)
    assert {f"{of}.{name}" for of in events.CLASSES for name in events.events(of)} == {*drawn}


def test_each_file_on_the_page_of_the_architecture_exists() -> None:
    named = set(re.findall(r"\b[a-z_]+/(?:\w+/)*\w*(?:\.py)?", events.PAGE.read_text("utf-8")))
    code = {name for name in named if name.endswith((".py", "/"))}
    assert {
        n for n in code if not any((at / n).exists() for at in (ROOT, ROOT / "s3cache"))
    } == set()
    assert "hooks/_lookups.py" in code, "the pattern finds none"


# -- the threat model


THREATS = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")


def test_each_attack_has_a_test_or_is_marked_as_successful() -> None:
    attacks = THREATS.partition("## Attacks")[2].partition("## What entries say")[0]
    rows = re.findall(r"^\|(?! attack|---)(.+)\|$", attacks, re.MULTILINE)
    assert len(rows) >= 40
    for row in rows:
        _, happens, shown_by = row.split("|")
        assert "::test_" in shown_by or "**" in happens, row
    for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", THREATS):
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(async )?def {test}\(", text, re.MULTILINE), (file, test)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_benchmarks_shows_the_measured_results(name: str) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    results = ROOT / "docs" / "benchmarks" / f"{name}.json"
    if results.exists():
        text = render(json.loads(results.read_text(encoding="utf-8")), COMMANDS[name])
        assert fill(page, f"bench:{name}", text) == page
    else:
        assert f"Not measured yet: `{COMMANDS[name]}`" in page


# -- claims about versions


def test_ci_and_the_readme_have_each_claimed_python_and_torch_release() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    classifiers = "\n".join(metadata("torch-s3cache").get_all("Classifier") or [])
    claimed = re.findall(r":: Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    assert jobs["test"]["strategy"]["matrix"]["python"] == claimed
    assert SUPPORTED["Python"][0] == f"{claimed[0]} to {claimed[-1]}"
    versions = jobs["torch"]["strategy"]["matrix"]["torch"]
    (major, oldest), (_, newest) = internals.OLDEST, internals.NEWEST
    expected = [f"{major}.{minor}" for minor in range(oldest, newest + 1)]
    assert [version.rpartition(".")[0] for version in versions] == expected
    assert SUPPORTED["torch"][0].startswith(f"{expected[0]} to {expected[-1]};")


# -- the table of what is supported

README = (ROOT / "README.md").read_text(encoding="utf-8")
SUPPORTED = {
    cells[0]: cells[1:]
    for row in re.findall(r"^\|(.+)\|$", README.partition("## What is supported")[2], re.MULTILINE)
    if len(cells := [cell.strip() for cell in row.split(" | ")]) == 3
    and cells[0] not in ("what", "---")
}
# How a page would deny a row of the table.
DENIALS = {
    "one compile for all processes of a machine": (
        r"ranks[^.|]* all compile|none waits for another",
        "ranks that start at once all compile.",
    ),
    "one compile for a fleet": (
        r"machines[^.|]* all compile|pods[^.|]* all compile|no locks in",
        "Machines that start together on an empty cache all compile, so let one go first.",
    ),
    "one entry for all GPUs of a machine": (
        r"keys? (has|have|holds?|includes?)[^.|]* index of",
        "Keys have everything that torch's keys have, including the index of an input's device.",
    ),
}
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"),
        *sorted(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")),
    ]
}
TEXT = "\n".join(PAGES.values())
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_settings_in_the_table_have_the_defaults_that_it_shows() -> None:
    shown = dict(re.findall(r"`(\w+)=(\w+)`", " ".join(row[0] for row in SUPPORTED.values())))
    assert set(shown) == {"wait_s", "leases", "recall"}
    for name, default in shown.items():
        value = getattr(Settings(), name)
        assert default == (f"{value:g}" if isinstance(value, float) else value), name


def test_the_table_names_every_scheme_and_tests_that_exist() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url("gs://name/prefix")
    schemes = re.findall(r"`(\w+)://`", SUPPORTED["storage"][0])
    assert {*re.findall(r"(\w+)://", str(caught.value))} - {"gs"} == {*schemes}
    assert len(SUPPORTED) > 10
    for name, (_, tests) in SUPPORTED.items():
        paths = re.findall(r"\]\(([\w/.]+)", tests)
        assert paths, name
        assert all((ROOT / path).exists() for path in paths), name


def test_only_the_table_says_what_is_not_supported() -> None:
    """Other pages link to it, except for a release of torch, which is detected at run time."""
    for name, text in PAGES.items():
        words = " ".join(text.split())
        for row, (pattern, denial) in DENIALS.items():
            assert SUPPORTED[row][0].startswith("yes")
            assert re.search(pattern, denial, re.IGNORECASE)
            denied = re.search(pattern, words, re.IGNORECASE)
            assert denied is None, f"{name}: {words[denied.start() - 80 : denied.end() + 80]}"
        for match in re.finditer(r"not supported", words, re.IGNORECASE):
            is_of_torch = "torch" in words[match.start() - 40 : match.start()]
            assert is_of_torch or not name.startswith("docs"), name


def test_commands_on_the_pages_exist() -> None:
    blocks = "\n".join(text for language, text in BLOCK.findall(TEXT) if not language)
    named = {*re.findall(r"^(?:python -m )?s3cache ([a-z]+)\b", blocks, re.MULTILINE)}
    there = re.findall(r"^## s3cache (\w+)", PAGES["docs/commands.md"], re.MULTILINE)
    assert {"check", "report", "run", "explain"} <= named <= {*there}


def test_make_targets_on_the_pages_exist() -> None:
    """Targets in blocks and in sentences count."""
    targets = re.findall(r"^([a-z][a-z-]*):", PAGES["Makefile"], re.MULTILINE)
    named = {*re.findall(r"(?:`|^)make ([a-z][a-z-]*)(?=[ `\n])", TEXT, re.MULTILINE)}
    assert {"demo", "test", "test-rgw", "bench-keys"} <= named <= {*targets}


def test_scripts_on_the_pages_exist() -> None:
    pattern = r"(?<![\w/])((?:infra|benchmarks)/(?!test_)[\w/.]+\.(?:sh|py)|tests/[\w/.]+\.sh)\b"
    scripts = {*re.findall(pattern, TEXT)}
    assert {script for script in scripts if not (ROOT / script).exists()} == set()
    assert "infra/venv.sh" in scripts, "the pattern finds none"


def test_variables_on_the_pages_are_settings() -> None:
    known = {f"S3CACHE_{name.upper()}" for name in (*Settings.__dataclass_fields__, *STORE_OPTIONS)}
    named = {*re.findall(r"\bS3CACHE_(?!TEST_)[A-Z0-9_]*[A-Z0-9]\b", TEXT)}
    assert named - known - {"S3CACHE_AUTOLOAD", JOB} == set()


# -- data


def document(page: str, language: str) -> Any:
    """Return the only block of data in a language on a page."""
    (text,) = (text for kind, text in BLOCK.findall(PAGES[page]) if kind == language)
    return json.loads(text) if language == "json" else yaml.safe_load(text)


def s3(url: str) -> S3Options:
    location = parse_url(url)
    assert isinstance(location, S3Options)
    return location


def test_the_trust_file_on_the_page_is_valid() -> None:
    content = document("docs/trust.md", "json")
    assert set(content) == {"trust", "trusted_keys", "revoked"}
    assert Settings(trust=content["trust"]).trust == "require"
    (key,) = parse_trusted(" ".join(content["trusted_keys"]), audience="main")
    assert key.key.name == "ci-main-1"


def test_the_url_on_the_minio_page_equals_that_of_its_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "infra/minio/compose.yaml").read_text(encoding="utf-8"))
    (url,) = re.findall(r'S3CACHE_URL="(.+?)"', PAGES["docs/operating/minio.md"])
    assert s3(url).url == s3(compose["services"]["init"]["environment"]["S3CACHE_URL"]).url


def test_the_github_workflow_has_a_role_and_few_permissions() -> None:
    workflow = document("docs/operating/github-actions.md", "yaml")
    assert workflow["permissions"] == {"contents": "read", "id-token": "write"}
    (job,) = workflow["jobs"].values()
    assert s3(job["env"]["S3CACHE_URL"]).url.startswith("s3://example-compile-cache/main")
    # Mode and role are chosen by the same condition.
    chosen = [str(job["env"]["S3CACHE_MODE"])]
    chosen += [step["with"]["role-to-assume"] for step in job["steps"] if "role" in str(step)]
    assert len({text.partition("&&")[0] for text in chosen}) == 1
