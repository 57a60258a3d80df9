"""Several users of one machine, each in child processes of its own; only root can be them."""

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
needs_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


def as_user(user: int, work: Callable[[], object]) -> None:
    """Do the work in a child process of that user; it must end well."""
    assert join_child(begun_as(user, work)) == 0


def begun_as(user: int, work: Callable[[], object]) -> int:
    """The child process, which ends with 0 if the work does well."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            work()
            status = 0
        except BaseException:  # it must not go on as pytest
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return child


@pytest.fixture
def common() -> Iterator[Path]:
    """A directory that all users can reach, which the attacker owns."""
    path = Path(tempfile.mkdtemp())  # pytest's own are closed to others
    path.chmod(0o755)
    os.chown(path, ATTACKER, ATTACKER)
    yield path
    shutil.rmtree(path)
