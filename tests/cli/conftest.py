"""Commands in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from s3cache.cli import main
from tests.cli.commands import Call, Done


@pytest.fixture
def at(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """The URL of an empty prefix on the server that listens there, with credentials for it."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    return lambda port: f"{url}?endpoint_url=http://127.0.0.1:{port}&region=us-east-1"


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Call:
    """A command, on a machine with a local tier that is empty at first."""
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(tmp_path / "local"))

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        written = capsys.readouterr()
        return Done(code, written.out, written.err)

    return run
