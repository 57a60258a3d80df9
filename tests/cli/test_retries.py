"""A terminal shows each request that is tried again; nothing else does."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import LONG_S


@pytest.mark.parametrize("at_terminal", [True, False])
def test_a_request_that_is_tried_again_is_shown_on_a_terminal_only(
    tmp_path: Path, at_terminal: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, "-m", "s3cache", "ls", "--url", "s3://bucket/prefix"]
    environment = {
        **{name: value for name, value in os.environ.items() if name[:7] != "S3CACHE"},
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "S3CACHE_ENDPOINT_URL": endpoint,
        "S3CACHE_REGION": "us-east-1",
        "S3CACHE_LOCAL_DIR": str(tmp_path),
        "S3CACHE_RETRY_ATTEMPTS": "2",
    }
    ours, theirs = pty.openpty() if at_terminal else os.pipe()
    with open(ours, "rb", buffering=0) as said, open(theirs, "wb") as stderr:
        done = subprocess.run(command, env=environment, stderr=stderr, timeout=LONG_S, check=False)
        text = said.read(1 << 16).decode()
    assert done.returncode == 3
    lines = text.splitlines()
    assert lines[-1].startswith("s3cache: error: list")
    again = [line for line in lines if line.endswith("; it is tried again")]
    assert len(again) == (1 if at_terminal else 0)
    assert len(lines) == len(again) + 1
