"""Roots that others may reach, servers that answer what they like, and machines that use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.environment import clean_environment
from tests.support.scripted import open_scripted, server
from tests.support.served import bucket, moto_port, new_machine, proxy, url
from tests.support.users import common

__all__ = [
    "bucket",
    "clean_environment",
    "common",
    "moto_port",
    "new_machine",
    "open_scripted",
    "proxy",
    "server",
    "url",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"
