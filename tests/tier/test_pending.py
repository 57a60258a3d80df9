"""Pending uploads: each has one owner, and exactly one adopter after it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.store import Directory
from s3cache.testing.contract import ODD_KEYS
from s3cache.tier._pending import Pending
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Another = Callable[[], Pending]

NAMES_THAT_COULD_CLASH = ["lock", ".lock", "..lock", "%2Elock", ".nfs0001", "%2e", "pending", "~"]


def pending_at(root: Path, note: bytes = b"") -> Pending:
    return Pending(lambda make: Directory.at(str(root), make=make), note)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pending"


@pytest.fixture
def another(root: Path) -> Iterator[Callable[[], Pending]]:
    """Make further owners, as other processes would be: each has a lock of its own."""
    made: list[Pending] = []

    def make() -> Pending:
        made.append(pending_at(root))
        return made[-1]

    yield make
    for pending in made:
        pending.release()


@pytest.fixture
def pending(another: Callable[[], Pending]) -> Pending:
    return another()


@pytest.mark.parametrize("name", [*ODD_KEYS, *NAMES_THAT_COULD_CLASH])
def test_any_name_goes_from_owner_to_adopter(pending: Pending, another: Another, name: str) -> None:
    assert pending.add(name)
    assert pending.all_pending() == {name}
    pending.release()
    adopter = another()
    assert adopter.adopt("") == [name]
    assert adopter.mine("") == [name]
    adopter.remove(name)
    assert adopter.all_pending() == set()


def test_names_as_long_as_the_cache_makes_them_fit(pending: Pending) -> None:
    """A namespace of 16, a spread of 3, a key of 128 and a variant of 64 characters."""
    name = f"{'f' * 16}/v1/abc/{'k' * 128}.{'v' * 64}"
    assert pending.add(name)
    assert pending.mine("") == [name]


def test_a_live_owner_keeps_its_uploads(pending: Pending, another: Another) -> None:
    pending.add("a")
    adopter = another()
    adopter.add("b")
    assert adopter.adopt("") == []
    assert pending.adopt("") == []
    assert (pending.mine(""), adopter.mine("")) == (["a"], ["b"])
    assert pending.all_pending() == {"a", "b"}


def test_namespaces_are_adopted_apart(pending: Pending, another: Another) -> None:
    for name in ("one/a", "one/b", "two/a", "on"):
        pending.add(name)
    assert sorted(pending.mine("one/")) == ["one/a", "one/b"]
    pending.release()
    first, second, third = another(), another(), another()
    assert sorted(first.adopt("one/")) == ["one/a", "one/b"]
    assert second.adopt("two/") == ["two/a"]
    assert first.adopt("one/") == second.adopt("two/") == []
    assert third.adopt("") == ["on"]


def test_an_upload_of_two_owners_is_adopted_once(pending: Pending, another: Another) -> None:
    adopter = another()
    for each in (pending, adopter):
        each.add("a")
    pending.release()
    assert adopter.adopt("") == ["a"]
    assert adopter.mine("") == ["a"]
    adopter.release()
    assert another().adopt("") == ["a"]


def test_directories_of_owners_without_uploads_are_removed(
    pending: Pending, another: Another, root: Path
) -> None:
    pending.add("a")
    pending.add("b")
    pending.remove("a")
    pending.release()
    adopter = another()
    adopter.adopt("")
    adopter.remove("b")
    adopter.release()
    assert os.listdir(root) == []


def test_after_release_a_new_owner_begins(pending: Pending, another: Another) -> None:
    pending.add("a")
    pending.release()
    pending.release()
    assert pending.mine("") == []
    pending.remove("a")
    pending.add("b")
    assert another().adopt("") == ["a"]
    assert pending.mine("") == ["b"]


# --- owners that do not exist yet, or no more


def test_an_owner_without_a_lock_yet_is_left_alone_for_a_while(
    pending: Pending, root: Path
) -> None:
    new, old = root / "new", root / "old"
    new.mkdir(parents=True)
    old.mkdir()
    long_ago = time.time() - 3_600
    os.utime(old, (long_ago, long_ago))
    assert pending.adopt("") == []
    assert new.exists()
    assert not old.exists()


@pytest.mark.parametrize("by_the_adopter", ["locked", "removed"])
def test_an_adopter_that_is_faster_than_a_new_owner_does_no_harm(
    pending: Pending, another: Another, monkeypatch: pytest.MonkeyPatch, by_the_adopter: str
) -> None:
    """It may lock the new directory first and find it empty; the owner makes another one."""
    flock, adopter, held = fcntl.flock, another(), []

    def adopted_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        if by_the_adopter == "removed":
            assert adopter.adopt("") == []
        else:
            held.append(os.open(os.readlink(f"/proc/self/fd/{fd}"), os.O_RDWR))
            flock(held[0], fcntl.LOCK_EX)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", adopted_first)
    pending.add("a")
    for fd in held:
        os.close(fd)
    assert adopter.adopt("") == []
    assert pending.mine("") == ["a"]


def test_other_files_are_neither_owners_nor_uploads(
    pending: Pending, another: Another, root: Path
) -> None:
    pending.add("a")
    (root / "stray").write_bytes(b"x")
    (next(path for path in root.iterdir() if path.is_dir()) / ".nfs0001").write_bytes(b"")
    assert pending.all_pending() == {"a"}
    pending.release()
    assert another().adopt("") == ["a"]


def test_adopting_returns_what_it_got_before_it_failed(
    pending: Pending, another: Another, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller would never upload it otherwise, and no other could adopt it."""
    for name in ("a", "b", "c"):
        pending.add(name)
    pending.release()
    adopter = another()
    replace, calls = os.replace, itertools.count()

    def full(source: str, target: str, **fds: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target, **fds)

    monkeypatch.setattr(os, "replace", full)
    first = adopter.adopt("")
    assert len(first) == 2
    assert sorted(adopter.mine("")) == sorted(first)
    monkeypatch.setattr(os, "replace", full_always)
    with pytest.raises(OSError, match="No space"):
        adopter.adopt("")
    monkeypatch.undo()
    assert sorted(first + adopter.adopt("")) == ["a", "b", "c"]


def full_always(source: str, target: str, **_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("kept", ["by NFS", "by another program"])
def test_an_owner_that_cannot_be_removed_is_no_error(
    pending: Pending, another: Another, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    """NFS keeps a file that is open under another name: the directory is not empty then."""

    def not_empty(path: str, **_: int) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    pending.add("a")
    pending.release()
    monkeypatch.setattr(os, "rmdir", not_empty)
    adopter = another()
    assert adopter.adopt("") == ["a"]
    assert adopter.adopt("") == []


def test_without_locks_nothing_is_added_and_nothing_leaks(
    pending: Pending, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="lock"):
            pending.add("a")
    assert len(os.listdir("/proc/self/fd")) == before


def owners_directory(root: Path) -> Path:
    (found,) = root.iterdir()
    return found


def test_uploads_that_vanish_while_adopted_take_no_others_with_them(
    pending: Pending, another: Another, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"name-{number}" for number in range(9)]
    for name in names:
        pending.add(name)
    pending.release()
    replace, gone = os.replace, list[str]()

    def vanishing(source: str, target: str, **fds: int) -> None:
        if len(gone) < 3:
            gone.append(source)
            os.unlink(source, dir_fd=fds["src_dir_fd"])
        replace(source, target, **fds)

    monkeypatch.setattr(os, "replace", vanishing)
    adopter = another()
    assert sorted(adopter.adopt("")) == sorted({*names} - {*gone})
    assert sorted(adopter.mine("")) == sorted({*names} - {*gone})
    assert len([*root.iterdir()]) == 1  # and the dead owner's directory is gone


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


def a_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def a_socket(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)


REPLACED = [a_pipe, a_directory, a_link, a_socket]


@pytest.mark.parametrize("make", REPLACED)
def test_what_is_no_file_is_no_upload_and_is_not_waited_for(
    pending: Pending, another: Another, root: Path, make: Callable[[Path], None]
) -> None:
    for name in ("a", "b", "c"):
        pending.add(name)
    directory = owners_directory(root)
    (directory / "b").unlink()
    make(directory / "b")
    assert sorted(pending.mine("")) == ["a", "c"]
    assert pending.note_of("b") is None
    pending.release()
    adopter = another()
    assert sorted(adopter.adopt("")) == ["a", "c"]
    assert adopter.note_of("a") == b""


@pytest.mark.parametrize("kept", range(18))
def test_a_note_that_was_cut_off_is_never_taken_for_none(root: Path, kept: int) -> None:
    """Without it the object would be uploaded in another way than its saver wanted."""
    saver, adopter = pending_at(root, note=b'{"sse": "aws:kms"}'), pending_at(root)
    saver.add("a")
    os.truncate(owners_directory(root) / "a", kept)
    saver.release()
    assert adopter.adopt("") == ["a"]
    note = adopter.note_of("a")
    assert note is not None
    assert (note == b"") == (kept == 0)  # an empty file has no note
    adopter.release()


@pytest.mark.parametrize("make", [*REPLACED, None])
def test_uploads_of_an_owner_without_a_lock_are_adopted_in_the_end(
    pending: Pending, another: Another, root: Path, make: Callable[[Path], None] | None
) -> None:
    """... and do not keep those of others from being adopted."""
    pending.add("a")
    directory = owners_directory(root)
    (directory / ".lock").unlink()
    if make is not None:
        make(directory / ".lock")
    neighbour = another()
    neighbour.add("b")
    neighbour.release()
    pending.release()
    adopter = another()
    assert adopter.adopt("") == ["b"]
    if make is a_directory:  # which is not empty, so that a person has to remove it
        assert adopter.adopt("") == []
        return
    then = time.time() - 61
    os.utime(directory, (then, then))
    assert adopter.adopt("") == []  # but it has a lock again
    assert adopter.adopt("") == ["a"]


def test_adopters_beside_a_vandal_get_all_that_it_leaves_alone(
    root: Path, another: Another
) -> None:
    """... each upload once, and none of them hangs."""
    kept = {f"kept-{number}" for number in range(60)}
    spoilt = [f"spoilt-{number}" for number in range(60)]
    for share in range(6):
        dead = another()
        for name in [*sorted(kept)[share::6], *spoilt[share::6]]:
            dead.add(name)
        dead.release()
    adopters = [another() for _ in range(4)]
    adopted: list[list[str]] = [[] for _ in adopters]
    begin = threading.Barrier(len(adopters) + 1)

    def vandalise() -> None:
        begin.wait()
        for number, name in enumerate(spoilt):
            for path in root.glob(f"*/{name}"):
                with contextlib.suppress(FileNotFoundError):
                    if number % 3 == 0:
                        os.truncate(path, 0)
                    else:
                        path.unlink()
                        REPLACED[number % len(REPLACED)](path)

    def adopt_all(number: int) -> None:
        begin.wait()
        for _ in range(20):
            adopted[number] += adopters[number].adopt("")
            for name in adopters[number].mine(""):
                adopters[number].note_of(name)

    threads = [threading.Thread(target=vandalise)]
    threads += [
        threading.Thread(target=adopt_all, args=(number,)) for number in range(len(adopters))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    everything = [name for names in adopted for name in names]
    assert sorted(name for name in everything if name in kept) == sorted(kept)
    assert sorted(name for adopter in adopters for name in adopter.mine("kept")) == sorted(kept)
