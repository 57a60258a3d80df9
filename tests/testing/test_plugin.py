"""pytest finds the plugin by itself, and pays for it only where its fixtures are used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from pathlib import Path


HEAVY = ("torch", "numpy", "boto3", "botocore", "aioboto3", "moto", "flask", "hypothesis", "http")


def pytest_in(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
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


def test_the_contract_shows_what_it_compared(tmp_path: Path) -> None:
    """Its asserts are rewritten, as those of a test module are."""
    (tmp_path / "test_theirs.py").write_text(
        "import pytest\n"
        "from s3cache.store import MemoryStore\n"
        "from s3cache.testing import StoreContract\n"
        "class Forgetful(MemoryStore):\n"
        "    async def head(self, key):\n"
        "        return None\n"
        "class TestForgetful(StoreContract):\n"
        "    @pytest.fixture\n"
        "    def store(self):\n"
        "        return Forgetful()\n"
    )
    done = pytest_in(tmp_path, "-q", "-k", "round_trip and 4Ki or lies_there")
    assert done.returncode == 1
    assert "assert None == 4096" in done.stdout
    assert "1 failed, 1 skipped" in done.stdout.splitlines()[-1]
