"""Files for deployment agree with each other and with s3cache, and scripts do what they promise."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from infra import policies
from infra.docs.site import ADDED, fetched, on_config
from s3cache.metrics import FAMILIES, Family
from s3cache.store import parse_url
from tests.support.pages import ROOT
from tests.support.waiting import LONG_S

MINIO = ROOT / "infra" / "minio"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((MINIO / "compose.yaml").read_text())["services"]


def test_the_urls_for_users_lead_to_the_prefixes_of_the_policies(services: dict[str, Any]) -> None:
    variables = services["init"]["environment"]
    for variable, prefix in (("S3CACHE_URL", policies.MAIN), ("S3CACHE_PULLS_URL", policies.PULLS)):
        where: Any = parse_url(variables[variable])
        assert (where.bucket, where.prefix) == (variables["S3CACHE_BUCKET"], prefix)
        assert where.endpoint_url == "http://127.0.0.1:9000"
    for role in policies.ROLES:
        policy = json.loads((MINIO / f"{role.file}.json").read_text())
        assert policy["Statement"][-1]["Resource"] == [
            f"arn:aws:s3:::{variables['S3CACHE_BUCKET']}"
        ]


def test_ports_are_bound_to_loopback_and_no_secret_has_a_default(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service.get("network_mode") != "host"
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
        for name, value in service["environment"].items():
            if re.search(r"USER|PASSWORD|SECRET|_KEY$", name):
                assert value.startswith(f"${{{name}:?")


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


DOCS = ROOT / "docs"
PAGES = sorted([*ADDED.values(), *(str(each.relative_to(DOCS)) for each in DOCS.rglob("*.md"))])


def navigation() -> list[Any]:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav: list[Any] = yaml.load(text, yaml.BaseLoader)["nav"]
    return nav


def names(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list):
        for item in nav:
            yield from names(item)
    elif isinstance(nav, dict):
        yield from names([*nav.values()])


def test_every_page_is_in_the_navigation_once() -> None:
    found = Counter(names(on_config(SimpleNamespace(nav=navigation())).nav))
    assert sorted(found) == PAGES
    assert set(found.values()) == {1}


def test_resources_from_other_servers_are_found() -> None:
    place = '"https://example.com/x"'
    for text in (f"<script src={place}>", f'<img alt="" src={place}>', f"url({place[1:-1]})"):
        assert len(fetched(text)) == 1
    assert fetched(f'<a href={place}>there</a><script src="assets/x.js"></script>') == []


SCRIPTS = sorted([*(ROOT / "infra").rglob("*.sh"), ROOT / ".ci" / "run"])
RUN = ROOT / "infra" / "rgw" / "run.sh"
TOOLS = ["bash", "cat", "dirname", "env", "grep", "head", "ls", "mktemp", "mv", "rm", "seq"]
TOOLS += ["sleep", "tail", "timeout", "tr"]
CANNOT_INSTALL = 75


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_parses_stops_at_errors_and_is_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    if script.name.startswith("_"):
        assert not text.startswith("#!")  # sourced
    else:
        assert text.startswith("#!")
        assert "\nset -eu" in text
        assert os.access(script, os.X_OK)


def test_run_without_ceph_fails_or_if_possible_runs_the_command_without_a_gateway(
    tmp_path: Path,
) -> None:
    """The PATH has only basic tools: no Ceph, no apt-get."""
    tools, scratch = tmp_path / "bin", tmp_path / "tmp"
    tools.mkdir()
    scratch.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    plain = {"PATH": str(tools), "TMPDIR": str(scratch), "S3CACHE_TEST_RGW_ENDPOINT": "stale"}

    def run(environment: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
        command, pipe = [str(RUN), *args], subprocess.PIPE
        return subprocess.run(
            command, env=environment, stdout=pipe, stderr=pipe, text=True, timeout=LONG_S
        )

    done = run(plain, "bash", "-c", "echo ran")
    assert (done.returncode, done.stdout) == (CANNOT_INSTALL, "")
    assert "cannot install Ceph here" in done.stderr
    show = 'echo "endpoint=${S3CACHE_TEST_RGW_ENDPOINT-unset} dir=${S3CACHE_TEST_RGW_DIR-unset}"'
    for setting in ({}, {"S3CACHE_TEST_RGW": "off"}):
        done = run({**plain, **setting}, "--if-possible", "bash", "-c", f"{show}; exit 7")
        assert done.returncode == 7
        assert done.stdout == "endpoint=unset dir=unset\n"
        assert "will be skipped" in done.stderr
        assert [*scratch.iterdir()] == []
