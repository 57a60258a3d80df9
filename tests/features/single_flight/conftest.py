"""A machine that is slow, and processes that share its directory."""

from __future__ import annotations

import pytest

from s3cache.util.threads import DeadlineExecutor
from tests.support.stopped import start as start
from tests.support.waiting import LONG_S


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a call of the disk take long, as it may if many tests run at once."""
    monkeypatch.setattr(DeadlineExecutor, "limit_s", LONG_S)
