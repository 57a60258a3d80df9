"""The environment of tests that talk to a server; a ``conftest.py`` that imports it has it."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the developer's own machine is set up for must not reach a test."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "S3CACHE_")) and not name.startswith("S3CACHE_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
