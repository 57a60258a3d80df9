"""The workflows of GitHub run what is there, with no more rights than they need."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import yaml

from s3cache import __version__
from s3cache.torch_api import internals

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS: dict[str, Any] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}


def commands(job: Any) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


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
