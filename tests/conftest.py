"""Fixtures for every test."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from blockbuster import blockbuster_ctx

from s3cache.store import DeadlineExecutor
from tests.support import compiled
from tests.support.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["tests.support.density", "tests.support.schedule"]

# Without torch, and mypy, there is still the engine to test: make test-pythons.
WITH_TORCH = "artifact examples graph hooks kinds models opinfo perturb torch_api typing"
collect_ignore = [] if find_spec("torch") else WITH_TORCH.split()

compiled.put_first()


@pytest.fixture(autouse=True)
def loop_blocking() -> Iterator[None]:
    """Fail a test in which s3cache blocks the event loop: a slow disk would stop every transfer.

    Only calls made from s3cache's own files count; tests, the contract suite among them, may touch
    the disk as they like. An S3 client may be made, and its credentials looked for: that happens on
    a loop and a thread of its own. The AWS configuration is a small file.
    """
    with blockbuster_ctx("s3cache", excluded_modules=["s3cache.testing"]) as blockbuster:
        for function in blockbuster.functions.values():
            function.can_block_in("s3cache/store/s3/_session.py", "run_on_new_loop")
            function.can_block_in("s3cache/store/s3/_options.py", "_sections")
        yield


@pytest.fixture(autouse=True)
def disk_deadline() -> Iterator[None]:
    """Wait for a slow disk as long as it takes: tests of a disk that hangs set a limit.

    Without ``monkeypatch``, which would then begin before ``loop_blocking`` and end after it.
    """
    usual_s, DeadlineExecutor.limit_s = DeadlineExecutor.limit_s, 3600.0
    yield
    DeadlineExecutor.limit_s = usual_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
