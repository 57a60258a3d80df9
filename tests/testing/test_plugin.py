"""pytest finds the plugin by itself, and pays for it only where its fixtures are used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from pathlib import Path

    from s3cache.testing import MotoBucket

HEAVY = ("torch", "numpy", "boto3", "botocore", "aioboto3", "moto", "flask", "hypothesis", "http")


def pytest_in(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A user's run of pytest in a project of their own."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )


def test_a_run_that_uses_no_fixture_of_ours_has_imported_nothing_for_it(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n"
        "def test_theirs(request):\n"
        "    assert request.config.pluginmanager.has_plugin('s3cache')\n"
        "    print(*sys.modules, sep='\\n')\n"
    )
    plugins = {each.name for each in entry_points(group="pytest11")} - {"s3cache"}
    others = [f"-pno:{name}" for name in sorted(plugins)]
    done = pytest_in(tmp_path, "-q", "-rP", *others)
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = set(done.stdout.split())
    assert "s3cache.testing.plugin" in loaded
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in loaded if name.startswith("s3cache")} == {
        "s3cache",
        "s3cache.util",
        "s3cache.testing",
        "s3cache.testing.plugin",
    }


def test_the_fixtures_are_listed_with_what_they_are(tmp_path: Path) -> None:
    said = pytest_in(tmp_path, "--fixtures").stdout
    for name in ("s3cache_machine", "s3cache_moto", "s3cache_moto_server [session scope]"):
        assert f"\n{name} -- " in said
    assert "An empty bucket for this test alone" in said


seen: list[str] = []


@pytest.mark.parametrize("test", ["one", "another"])
def test_buckets_are_not_shared_between_tests(s3cache_moto: MotoBucket, test: str) -> None:
    assert s3cache_moto.name not in seen
    seen.append(s3cache_moto.name)
