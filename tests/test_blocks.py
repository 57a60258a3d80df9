"""What pages show beside programs: commands, variables and data are those that there are.

Programs in Python are run as they stand by ``tests/examples/test_readme.py``, and files by the
tests of their page (``test_getting_started.py``).
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


def test_commands_on_the_pages_are_there() -> None:
    named = {
        command
        for _, language, text in BLOCKS
        if not language
        for command in re.findall(r"^(?:python -m )?s3cache ([a-z]+)\b", text, re.MULTILINE)
    }
    there = re.findall(r"^## s3cache (\w+)", PAGES["docs/commands.md"], re.MULTILINE)
    assert named - {*there} == set()
    assert named >= {"check", "report", "run", "explain"}, "the pattern finds none"


def test_what_pages_make_is_in_the_makefile() -> None:
    """In blocks and in sentences."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    made = {
        target
        for text in PAGES.values()
        for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)(?=[ `\n])", text, re.MULTILINE)
    }
    assert made - targets == set()
    assert made >= {"demo", "test", "test-rgw", "bench-keys"}, "the pattern finds none"


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


def test_the_machines_own_file_is_one_that_can_be_read() -> None:
    (content,) = documents("docs/trust.md", "json")
    assert set(content) == {"trust", "trusted_keys", "revoked"}
    assert Settings(trust=content["trust"]).trust == "require"
    (key,) = parse_trusted(" ".join(content["trusted_keys"]), audience="main")
    assert key.key.name == "ci-main-1"


def test_the_url_on_the_page_of_minio_is_that_of_its_compose_file() -> None:
    compose = yaml.safe_load((ROOT / "infra/minio/compose.yaml").read_text(encoding="utf-8"))
    (said,) = re.findall(r'S3CACHE_URL="(.+?)"', PAGES["docs/operating/minio.md"])
    assert s3(said).url == s3(compose["services"]["init"]["environment"]["S3CACHE_URL"]).url


def s3(url: str) -> S3Options:
    location = parse_url(url)
    assert isinstance(location, S3Options)
    return location


def test_the_workflow_of_github_has_a_role_and_few_rights() -> None:
    (workflow,) = documents("docs/operating/github-actions.md", "yaml")
    assert workflow["permissions"] == {"contents": "read", "id-token": "write"}
    (job,) = workflow["jobs"].values()
    assert s3(job["env"]["S3CACHE_URL"]).url.startswith("s3://example-compile-cache/main")
    # The order in which mode and role are chosen is one.
    chosen = [str(job["env"]["S3CACHE_MODE"])]
    chosen += [step["with"]["role-to-assume"] for step in job["steps"] if "role" in str(step)]
    assert len({text.partition("&&")[0] for text in chosen}) == 1
