"""Pending uploads: each has one owner, and then exactly one adopter."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3cache.errors import ClosedError
from s3cache.store import Directory
from s3cache.tier._pending import Pending
from tests.support.contract import ODD_KEYS
from tests.support.stopped import descriptors

Another = Callable[..., Pending]

NAMES_THAT_COULD_CLASH = ["lock", ".lock", "%2Elock", ".nfs0001", "a@b", "pending", "~"]
# A namespace of 16, a spread of 1, a key of 128 and a variant of 64 characters.
LONGEST = f"{'f' * 16}/v1/a/{'k' * 128}.{'v' * 64}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pending"


@pytest.fixture
def another(root: Path) -> Iterator[Another]:
    """Return a function that makes owners with their own locks, as in other processes."""
    made: list[Pending] = []

    def make() -> Pending:
        made.append(Pending(lambda make: Directory.at(str(root), make=make)))
        return made[-1]

    yield make
    for pending in made:
        pending.close()


@pytest.fixture
def pending(another: Another) -> Pending:
    return another()


@pytest.mark.parametrize("name", [*ODD_KEYS, *NAMES_THAT_COULD_CLASH, LONGEST])
def test_any_name_passes_from_owner_to_adopter(
    pending: Pending, another: Another, root: Path, name: str
) -> None:
    """No file is left after the last owner has uploaded everything."""
    assert pending.add(name)
    assert pending.all_pending() == {name}
    assert another().adopt() == []
    pending.close()
    adopter = another()
    assert adopter.adopt() == [name]
    assert adopter.mine() == [name]
    adopter.remove(name)
    adopter.close()
    assert os.listdir(root) == []


def test_an_owner_that_is_closed_during_an_adoption_leaves_all_uploads_to_others(
    pending: Pending, another: Another, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adopting and closing run on two threads: no lock may stay held."""
    first, locks, take = another(), list[str](), Directory.try_lock
    first.add("a")
    first.close()

    def close_and_take(root: Directory, name: str) -> int | None:
        locks.append(name)
        if len(locks) == 2:  # the first is that of ``first``, the second its own
            pending.close()
        return take(root, name)

    monkeypatch.setattr(Directory, "try_lock", close_and_take)
    with pytest.raises(ClosedError):
        pending.adopt()
    assert another().adopt() == ["a"]


def test_at_most_the_requested_number_is_adopted(pending: Pending, another: Another) -> None:
    for name in ("a/1", "b/1", "b/2", "b/3"):
        pending.add(name)
    pending.close()
    one, two = another(), another()
    adopted = one.adopt("b/", 2)
    assert len(adopted) == 2
    assert sorted(adopted + two.adopt()) == ["a/1", "b/1", "b/2", "b/3"]


def test_without_locks_nothing_is_added_and_nothing_leaks(
    pending: Pending, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    before = descriptors(root)
    for _ in range(5):
        with pytest.raises(OSError, match="lock"):
            pending.add("a")
    assert descriptors(root) == before


def a_directory(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


def a_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def a_socket(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)


@pytest.mark.parametrize("make", [os.mkfifo, a_link, a_socket])
def test_a_record_that_is_not_a_file_is_ignored_and_does_not_block(
    pending: Pending, another: Another, root: Path, make: Callable[[Path], None]
) -> None:
    for name in ("a", "b", "c"):
        pending.add(name)
    (file,) = root.glob("b@*")
    file.unlink()
    make(file)
    assert sorted(pending.mine()) == ["a", "c"]
    assert not pending.holds("b")
    pending.close()
    adopter = another()
    assert sorted(adopter.adopt()) == ["a", "c"]
    assert adopter.holds("a")


@pytest.mark.parametrize("make", [os.mkfifo, a_directory, a_link, a_socket, None])
def test_an_owner_with_a_damaged_lock_does_not_prevent_adoption_from_others(
    pending: Pending, another: Another, root: Path, make: Callable[[Path], None] | None
) -> None:
    pending.add("a")
    (lock,) = root.glob("*.lock")
    lock.unlink()
    if make is not None:
        make(lock)
    pending.close()
    neighbour = another()
    neighbour.add("b")
    neighbour.close()
    # Only a person can remove a directory that is not empty.
    assert sorted(another().adopt()) == (["b"] if make is a_directory else ["a", "b"])
