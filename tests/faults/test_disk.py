"""Each operation with each fault of the disk: its result is right, and no entry is lost.

A fault makes system calls fail as they would on a real disk, in the local directory only. Tests of
disks that hang are in ``tests/trust/test_hanging_disk.py``. Tests of mounted disks that are full or
read-only are in ``tests/tier/test_disk.py``.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from s3cache.cache import Cache, Hit, Miss, NotSaved, Saved
from s3cache.entries import first_name
from s3cache.stats import Reason
from s3cache.store import MemoryStore, MeteredStore, Store
from s3cache.tier import DiskTier
from tests.support.caching import KEY, OTHER, entry, open_cache, payload
from tests.support.stores import holds

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")

CREATING = {"creat", "mkdir", "link", "replace"}
WRITING = {*CREATING, "write", "pwrite", "fdatasync"}
CHANGING = {*WRITING, "unlink", "utime", "rmdir"}
OPENING = {"open", "creat", "scandir", "listdir"}
ALL = {*CHANGING, *OPENING, "pread", "stat"}


class Fault(NamedTuple):
    """The calls that fail, their error, and the result of a lookup and a save without a remote."""

    number: int
    calls: set[str]
    lookup: Reason | None  # None: the lookup hits
    save: Reason


FAULTS = {
    "no space": Fault(errno.ENOSPC, WRITING, None, Reason.FULL),
    "over the quota": Fault(errno.EDQUOT, WRITING, None, Reason.FULL),
    "no inodes": Fault(errno.ENOSPC, CREATING - {"replace"}, None, Reason.FULL),
    "read-only": Fault(errno.EROFS, CHANGING, None, Reason.UNAVAILABLE),
    "broken": Fault(errno.EIO, ALL, Reason.UNAVAILABLE, Reason.UNAVAILABLE),
    "broken for writing": Fault(errno.EIO, WRITING, None, Reason.UNAVAILABLE),
    "no descriptors": Fault(errno.EMFILE, OPENING, Reason.MACHINE, Reason.MACHINE),
    "names too long": Fault(errno.ENAMETOOLONG, CREATING, None, Reason.UNAVAILABLE),
}
faults = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)

_NAMES = (
    "open", "mkdir", "link", "replace", "write", "pwrite", "fdatasync", "unlink", "utime", "rmdir",
    "scandir", "listdir", "pread", "stat",
)  # fmt: skip


@contextlib.contextmanager
def failing(fault: Fault, root: Path) -> Iterator[list[str]]:
    """Make the fault's calls fail inside ``root``; yield a list that collects their names."""
    failed: list[str] = []

    readlink, stat = os.readlink, os.stat

    def is_inside(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        fds = [*args[:1], *(kwargs.get(name) for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"))]
        paths = (readlink(f"/proc/self/fd/{fd}") for fd in fds if isinstance(fd, int))
        return any(path.startswith(str(root)) for path in paths)

    def exists(path: Any, *_: Any, dir_fd: int | None = None) -> bool:
        with contextlib.suppress(OSError):
            stat(path, dir_fd=dir_fd, follow_symlinks=False)
            return True
        return False

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_there = name in ("open", "mkdir") and exists(*args, **kwargs)
            if name == "mkdir" and is_there:
                return original(*args, **kwargs)  # FileExistsError comes before the fault
            creates = name == "open" and args[1] & os.O_CREAT and not is_there
            kind = "creat" if creates else name
            if kind in fault.calls and is_inside(args, kwargs):
                failed.append(kind)
                raise OSError(fault.number, os.strerror(fault.number))
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in _NAMES:
            stack.enter_context(mock.patch.object(os, name, watched(name, getattr(os, name))))
        yield failed


@pytest.fixture
def remote() -> MeteredStore:
    return MeteredStore(MemoryStore())


def filled(root: Path, remote: Store | None, **changes: Any) -> Cache:
    cache = open_cache(root, remote, **changes)
    assert isinstance(cache.save(KEY, entry()), Saved)
    assert cache.flush(20).complete
    return cache


def check_as_before(root: Path, remote: Store | None) -> None:
    """Check that the entry on the disk is complete, and that the number of files is right."""
    with contextlib.closing(open_cache(root, remote)) as cache:
        hit = cache.lookup(KEY)
        assert isinstance(hit, Hit)
        assert (hit.tier, payload(hit.entry)) == ("local", payload(entry()))
        files = [path for path in (root / "objects").rglob("*") if path.is_file()]
        local = cache.stats().local
        assert local is not None
        assert local.files == len(files)
    assert os.listdir(root / "staging") == []


@faults
@pytest.mark.parametrize("has_remote", [False, True])
def test_lookup(root: Path, remote: MeteredStore, fault: Fault, has_remote: bool) -> None:
    """A readable entry hits; an unreadable one stays on the disk, and is a miss with its reason.

    If the remote has the entry, it hits, and its copy is not overwritten.
    """
    store = remote if has_remote else None
    cache = filled(root, store)
    with failing(fault, root) as failed:
        for _ in range(3):
            found = cache.lookup(KEY)
            if fault.lookup is None or has_remote:
                assert isinstance(found, Hit)
                assert found.tier == ("local" if fault.lookup is None else "remote")
                assert payload(found.entry) == payload(entry())
            else:
                assert failed
                assert isinstance(found, Miss)
                assert found.reason == fault.lookup
    cache.close()
    assert remote.snapshot()["put"].calls == has_remote
    check_as_before(root, store)


@faults
@pytest.mark.parametrize("has_remote", [False, True])
def test_save(
    root: Path,
    remote: MeteredStore,
    fault: Fault,
    has_remote: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A save reaches the remote, but is not durable; without one, it is refused with its reason.

    The existing entry stays.
    """
    store = remote if has_remote else None
    cache = filled(root, store)
    with failing(fault, root) as failed:
        for key in (OTHER, KEY):
            saved = cache.save(key, entry(key))
            assert failed
            if has_remote:
                assert isinstance(saved, Saved)
                assert not saved.durable
            else:
                assert isinstance(saved, NotSaved)
                assert saved.reason == fault.save
        assert not has_remote or cache.flush(20).complete
    cache.close()
    if has_remote:
        assert holds(remote, first_name(OTHER))
        assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    check_as_before(root, store)


@faults
def test_eviction(root: Path, fault: Fault) -> None:
    """A save that must evict an entry is refused; the disk and its number of files stay right."""
    with contextlib.closing(filled(root, None)) as cache:
        for number in range(9):
            assert isinstance(cache.save(f"key{number}", entry(f"key{number}")), Saved)
        assert isinstance(cache.lookup(KEY), Hit)
    cache = open_cache(root, None, local_max_files=10)
    with failing(fault, root):
        saved = cache.save(OTHER, entry(OTHER))
        assert isinstance(saved, NotSaved)
        assert saved.reason == fault.save
    cache.close()
    check_as_before(root, None)


@faults
def test_adoption(root: Path, remote: MeteredStore, fault: Fault) -> None:
    """Pending entries of a dead process stay on record until a process can upload them."""
    open_tier = functools.partial(DiskTier, root, namespace="one", max_bytes=1 << 20, max_files=100)
    dead = open_tier()
    dead.put_pending("left/1", b"x")
    dead.put_pending("left/2", b"x")
    dead.close()
    successor = open_tier()
    adopted: list[str] = []
    with failing(fault, root), contextlib.suppress(Exception):
        adopted = successor.adopt()
    assert sorted(adopted) == sorted(successor.pending())
    successor.close()
    last = open_tier()
    assert sorted(last.adopt()) == ["left/1", "left/2"]
    assert last.get("left/1") == last.get("left/2") == b"x"
    last.close()


@faults
def test_opening(root: Path, fault: Fault) -> None:
    """Opening a cache on an existing directory never raises; entries that can be read hit."""
    filled(root, None).close()
    with failing(fault, root):
        cache = open_cache(root, None)
        found = cache.lookup(KEY)
        assert isinstance(found, Hit) or (isinstance(found, Miss) and fault.lookup is not None)
        cache.close()
    check_as_before(root, None)
