"""Fixtures for commands in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from s3cache.cli import main
from tests.cli.commands import Call, Done


@pytest.fixture
def at(url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Set credentials; return a function from a server's port to the URL of an empty prefix."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
    return lambda port: f"{url}?endpoint_url=http://127.0.0.1:{port}&region=us-east-1"


@pytest.fixture
def call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Call:
    """Return a function that calls commands, on a machine with an empty local tier."""
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(tmp_path / "local"))

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        written = capsys.readouterr()
        return Done(code, written.out, written.err)

    return run
