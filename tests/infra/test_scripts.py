"""The shell scripts parse, and run.sh does what it promises where Ceph is not available."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.waiting import LONG_S

ROOT = Path(__file__).parents[2]
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


@pytest.fixture
def without_ceph(tmp_path: Path) -> dict[str, str]:
    """Return an environment with only basic tools in its PATH: no Ceph, no apt-get."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    return {"PATH": str(tools), "TMPDIR": str(scratch), "S3CACHE_TEST_RGW_ENDPOINT": "stale"}


def run(environment: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RUN), *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def test_run_reports_that_ceph_cannot_be_installed(without_ceph: dict[str, str]) -> None:
    done = run(without_ceph, "bash", "-c", "echo ran")
    assert (done.returncode, done.stdout) == (CANNOT_INSTALL, "")
    assert "cannot install Ceph here" in done.stderr


@pytest.mark.parametrize("setting", [{}, {"S3CACHE_TEST_RGW": "off"}], ids=["auto", "off"])
def test_if_possible_runs_the_command_without_a_gateway(
    without_ceph: dict[str, str], setting: dict[str, str]
) -> None:
    show = 'echo "endpoint=${S3CACHE_TEST_RGW_ENDPOINT-unset} dir=${S3CACHE_TEST_RGW_DIR-unset}"'
    done = run({**without_ceph, **setting}, "--if-possible", "bash", "-c", f"{show}; exit 7")
    assert done.returncode == 7
    assert done.stdout == "endpoint=unset dir=unset\n"
    assert "will be skipped" in done.stderr
    assert list(Path(without_ceph["TMPDIR"]).iterdir()) == []
