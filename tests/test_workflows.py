"""The workflows of GitHub run what is there, with no more rights than they need."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from s3cache import __version__
from s3cache.torch_api import internals

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS: dict[str, Any] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
JOBS = [
    pytest.param(job, id=f"{workflow}-{name}")
    for workflow, content in WORKFLOWS.items()
    for name, job in content["jobs"].items()
]
#: A major version, a commit, or the branch of releases that the package index itself names.
PINNED = re.compile(r"[\w-]+/[\w-]+@(v\d+|[0-9a-f]{40}|release/v\d+)")


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def called(text: str) -> Iterator[str]:
    """The targets that a script of a step makes."""
    for arguments in re.findall(r"^\s*make\b(.*)$", text, re.MULTILINE):
        yield from (word for word in arguments.split() if re.fullmatch(r"[a-z][a-z-]*", word))


def commands(job: Any) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_there_is_one_for_each_change_one_for_the_night_and_one_for_releases() -> None:
    assert set(WORKFLOWS) == {"ci", "nightly", "release"}


@pytest.mark.parametrize("job", JOBS)
def test_every_target_that_is_called_is_in_the_makefile(job: Any) -> None:
    assert {target for text in commands(job) for target in called(text)} <= targets()


def test_each_kind_of_check_is_called() -> None:
    every = {
        target
        for workflow in ("ci", "nightly")
        for job in WORKFLOWS[workflow]["jobs"].values()
        for text in commands(job)
        for target in called(text)
    }
    checks = {"lint", "docs", "test", "test-all", "test-dist"}
    assert every == checks | {"test-nightly", "test-gpu-standin", "test-torch"}


@pytest.mark.parametrize("job", JOBS)
def test_actions_are_pinned_and_jobs_end(job: Any) -> None:
    assert job["timeout-minutes"] <= (350 if "make test-nightly" in commands(job) else 150)
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert [action for action in used if not PINNED.fullmatch(action)] == []


def test_the_pythons_that_are_tested_are_those_that_the_package_claims() -> None:
    claimed = re.findall(
        r"^Programming Language :: Python :: (3\.\d+)$",
        "\n".join(metadata("torch-s3cache").get_all("Classifier") or []),
        re.MULTILINE,
    )
    assert WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]["python"] == claimed


def test_each_supported_release_of_torch_is_tested() -> None:
    versions = WORKFLOWS["ci"]["jobs"]["torch"]["strategy"]["matrix"]["torch"]
    tested = [tuple(map(int, version.split(".")[:2])) for version in versions]
    (major, oldest), (_, newest) = internals.OLDEST, internals.NEWEST
    assert tested == [(major, minor) for minor in range(oldest, newest + 1)]


def test_the_versions_of_torch_that_are_tested_are_documented() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    tested = WORKFLOWS["ci"]["jobs"]["torch"]["strategy"]["matrix"]["torch"]
    assert re.findall(r"^\| \**(2\.\d+\.\d+)\** \|", page, re.MULTILINE) == tested


def test_dependencies_are_updated_in_every_kind_that_is_used() -> None:
    text = (ROOT / ".github" / "dependabot.yml").read_text(encoding="utf-8")
    updates = yaml.safe_load(text)["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"pip", "github-actions"}


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda form: form.stem
)
def test_every_form_of_an_issue_can_be_filled_in(form: Path) -> None:
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.stem == "config":
        assert content["blank_issues_enabled"] is False
        return
    assert content["name"]
    assert content["description"]
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) >= 2
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_what_is_not_said_of_a_job_it_may_not_do(workflow: str) -> None:
    assert WORKFLOWS[workflow]["permissions"] == {"contents": "read"}


def test_only_the_release_can_sign_and_only_one_job_of_it_can_publish() -> None:
    granted = {
        name: set(job.get("permissions", {}))
        for content in WORKFLOWS.values()
        for name, job in content["jobs"].items()
        if "write" in job.get("permissions", {}).values()
    }
    assert granted == {
        "build": {"contents", "id-token", "attestations"},
        "publish": {"id-token"},
    }


def test_what_is_published_is_what_was_built_tried_and_attested() -> None:
    build, publish = (WORKFLOWS["release"]["jobs"][name] for name in ("build", "publish"))
    order = [step.get("uses", step.get("run", "")).partition("@")[0] for step in build["steps"]]
    tried, attested, handed_on = (
        order.index(step)
        for step in ("make test-dist", "actions/attest-build-provenance", "actions/upload-artifact")
    )
    assert tried < attested < handed_on
    assert publish["needs"] == "build"
    assert publish["environment"]["name"] == "pypi"
    assert commands(publish) == []  # nothing of the repository runs where the index is trusted
    steps = [step["uses"].partition("@")[0] for step in publish["steps"]]
    assert steps == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    assert build["steps"][-1]["with"]["name"] == publish["steps"][0]["with"]["name"]


def test_a_release_is_refused_where_its_tag_is_not_its_version() -> None:
    build = WORKFLOWS["release"]["jobs"]["build"]
    (check,) = (
        step["run"] for step in build["steps"] if step.get("name", "").startswith("The tag")
    )
    for tag, status in ((f"v{__version__}", 0), ("v999.0", 1), (__version__, 1)):
        done = subprocess.run(
            ["bash", "-c", check], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag}
        )
        assert done.returncode == status
