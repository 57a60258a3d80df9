"""Several users of one machine, each in its own child processes. Only root can do this."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.waiting import join_child

VICTIM, ATTACKER = 12_001, 12_002
needs_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


def as_user(user: int, work: Callable[[], object]) -> None:
    """Do the work in a child process of that user, and check that it succeeds."""
    assert join_child(begun_as(user, work)) == 0


def begun_as(user: int, work: Callable[[], object]) -> int:
    """Start the work in a child process of that user, and return its ID; success is status 0."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work()
            status = 0
        except BaseException:  # the child must not continue as pytest
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child


@pytest.fixture
def common() -> Iterator[Path]:
    """A directory of the attacker that all users can reach."""
    path = Path(tempfile.mkdtemp())  # pytest's directories are closed to others
    path.chmod(0o755)
    os.chown(path, ATTACKER, ATTACKER)
    yield path
    shutil.rmtree(path)
