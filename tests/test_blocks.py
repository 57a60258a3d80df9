"""Commands, variables and data on the pages exist and are valid.

``tests/examples/test_readme.py`` runs the Python programs of the pages. Tests of a page run its
files (``test_getting_started.py``).
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from s3cache.records import JOB
from s3cache.settings import Settings
from s3cache.store import STORE_OPTIONS, S3Options, parse_url
from s3cache.trust import parse_trusted
from tests.support.pages import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md")),
    ]
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [(page, *block) for page, text in PAGES.items() for block in BLOCK.findall(text)]


def test_commands_on_the_pages_exist() -> None:
    named = {
        command
        for _, language, text in BLOCKS
        if not language
        for command in re.findall(r"^(?:python -m )?s3cache ([a-z]+)\b", text, re.MULTILINE)
    }
    there = re.findall(r"^## s3cache (\w+)", PAGES["docs/commands.md"], re.MULTILINE)
    assert named - {*there} == set()
    assert named >= {"check", "report", "run", "explain"}, "the pattern finds none"


def test_make_targets_on_the_pages_exist() -> None:
    """Targets in blocks and in sentences count."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    made = {
        target
        for text in PAGES.values()
        for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)(?=[ `\n])", text, re.MULTILINE)
    }
    assert made - targets == set()
    assert made >= {"demo", "test", "test-rgw", "bench-keys"}, "the pattern finds none"


def test_scripts_on_the_pages_exist() -> None:
    pattern = r"(?<![\w/])((?:infra|benchmarks)/(?!test_)[\w/.]+\.(?:sh|py)|tests/[\w/.]+\.sh)\b"
    pages = {**PAGES, "Makefile": (ROOT / "Makefile").read_text(encoding="utf-8")}
    scripts = {
        (page, script) for page, text in pages.items() for script in re.findall(pattern, text)
    }
    assert {each for each in scripts if not (ROOT / each[1]).exists()} == set()
    assert ("Makefile", "infra/venv.sh") in scripts, "the pattern finds none"


def test_variables_on_the_pages_are_settings() -> None:
    known = {f"S3CACHE_{name.upper()}" for name in (*Settings.__dataclass_fields__, *STORE_OPTIONS)}
    named = {
        variable
        for text in PAGES.values()
        for variable in re.findall(r"\bS3CACHE_[A-Z0-9_]*[A-Z0-9]\b", text)
    }
    named = {each for each in named if not each.startswith("S3CACHE_TEST_")}
    assert named - known - {"S3CACHE_AUTOLOAD", JOB} == set()


# -- data


def documents(page: str, language: str) -> list[Any]:
    texts = [text for where, kind, text in BLOCKS if (where, kind) == (page, language)]
    return [json.loads(text) if language == "json" else yaml.safe_load(text) for text in texts]


def test_the_trust_file_on_the_page_is_valid() -> None:
    (content,) = documents("docs/trust.md", "json")
    assert set(content) == {"trust", "trusted_keys", "revoked"}
    assert Settings(trust=content["trust"]).trust == "require"
    (key,) = parse_trusted(" ".join(content["trusted_keys"]), audience="main")
    assert key.key.name == "ci-main-1"


def test_the_url_on_the_minio_page_equals_that_of_its_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "infra/minio/compose.yaml").read_text(encoding="utf-8"))
    (url,) = re.findall(r'S3CACHE_URL="(.+?)"', PAGES["docs/operating/minio.md"])
    assert s3(url).url == s3(compose["services"]["init"]["environment"]["S3CACHE_URL"]).url


def s3(url: str) -> S3Options:
    location = parse_url(url)
    assert isinstance(location, S3Options)
    return location


def test_the_github_workflow_has_a_role_and_few_permissions() -> None:
    (workflow,) = documents("docs/operating/github-actions.md", "yaml")
    assert workflow["permissions"] == {"contents": "read", "id-token": "write"}
    (job,) = workflow["jobs"].values()
    assert s3(job["env"]["S3CACHE_URL"]).url.startswith("s3://example-compile-cache/main")
    # Mode and role are chosen by the same condition.
    chosen = [str(job["env"]["S3CACHE_MODE"])]
    chosen += [step["with"]["role-to-assume"] for step in job["steps"] if "role" in str(step)]
    assert len({text.partition("&&")[0] for text in chosen}) == 1
