"""pytest finds the plugin by itself, and imports heavy packages only if a fixture is used."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from tests.support.scripts import python

HEAVY = ("torch", "numpy", "boto3", "botocore", "aioboto3", "moto", "flask", "hypothesis", "http")


def test_a_run_without_our_fixtures_imports_no_heavy_packages(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n"
        "def test_theirs(request):\n"
        "    assert request.config.pluginmanager.has_plugin('s3cache')\n"
        "    print(*sys.modules, sep='\\n')\n"
    )
    plugins = {each.name for each in entry_points(group="pytest11")} - {"s3cache"}
    others = [f"-pno:{name}" for name in sorted(plugins)]
    done = python("-m", "pytest", "-p", "no:cacheprovider", "-q", "-rP", *others, cwd=tmp_path)
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
