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
