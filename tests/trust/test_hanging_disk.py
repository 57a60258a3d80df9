"""A disk that hangs, as a frozen file system or a dead NFS, delays no caller for long."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.cache import Cache, Hit, Miss, Saved
from s3cache.errors import ConfigError, S3CacheError
from s3cache.settings import Settings
from s3cache.store import FileStore, MemoryStore, ObjectFiles
from s3cache.tier import DiskTier
from s3cache.util.deadline import DeadlineExecutor
from tests.support.caching import KEY, OTHER, entry, open_cache
from tests.support.hanging import FreezableDisk, dead_mount
from tests.support.marks import cases
from tests.support.waiting import LONG_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreezableDisk]:
    with FreezableDisk.mounted(tmp_path_factory.mktemp("freezable")) as disk:
        yield disk


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeadlineExecutor, "limit_s", 0.3)


# All that a tier does, in an order in which each finds something to do.
OPERATIONS: dict[str, Callable[[DiskTier], object]] = {
    "put": lambda tier: tier.put("new", b"x"),
    "put_pending": lambda tier: tier.put_pending("late", b"x"),
    "get": lambda tier: tier.get("old"),
    "peek": lambda tier: tier.peek("old"),
    "search": lambda tier: tier.search(["absent"], "old"),
    "head": lambda tier: tier.head("old"),
    "holds": lambda tier: tier.holds("old"),
    "objects": lambda tier: [*tier.objects()],
    "usage": lambda tier: tier.usage(),
    "pending": lambda tier: tier.pending(),
    "recorded": lambda tier: tier.recorded(),
    "adopt": lambda tier: tier.adopt(),
    "pending_object": lambda tier: tier.pending_object("old"),
    "give_back": lambda tier: tier.give_back("old"),
    "uploaded": lambda tier: tier.uploaded("late"),
    "delete": lambda tier: tier.delete("late"),
    "close": lambda tier: tier.close(),
}
# On a file system that is frozen these wait, and those that only read go on.
CHANGES = ["put", "put_pending", "get", "uploaded", "delete"]
# Calls of the system that ask no disk.
NO_DISK = {"fspath", "getcwd", "geteuid", "getpid", "urandom", "_path_normpath"}


def test_nothing_is_asked_of_the_disk_on_the_callers_thread(tmp_path: Path) -> None:
    """So it may hang in any call: it is another thread that hangs, for the caller so long."""
    asked: dict[str, set[str]] = {}

    def calls_in(work: Callable[[], object]) -> set[str]:
        names: set[str] = set()

        def note(_: object, event: str, function: object) -> None:
            module = getattr(function, "__module__", None)
            if event == "c_call" and module in ("posix", "fcntl", "_io", "io"):
                names.add(getattr(function, "__name__", ""))

        gc.disable()  # what others have left is closed on whatever thread it runs
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
            gc.enable()
        return names - NO_DISK

    public = {name for name, value in vars(DiskTier).items() if callable(value) and name[0] != "_"}
    assert OPERATIONS.keys() == public
    made: list[DiskTier] = []
    make = partial(DiskTier, tmp_path / "tier", max_bytes=1 << 20, max_files=100, note=b"note")
    asked["DiskTier()"] = calls_in(lambda: made.append(make()))
    (tier,) = made
    tier.put_pending("old", b"x")
    for name, operation in OPERATIONS.items():
        asked[name] = calls_in(lambda: operation(tier))  # noqa: B023
    assert {name: calls for name, calls in asked.items() if calls} == {}
    # ... and this would have noted it.
    files = ObjectFiles(tmp_path / "tier")
    assert {"open", "write", "replace"} <= calls_in(lambda: files.write("key", b"x"))


@pytest.mark.parametrize("operation", cases(CHANGES, slow_ones=["get", "delete"]))
def test_nothing_that_is_done_on_a_frozen_disk_takes_long(
    disk: FreezableDisk, operation: str
) -> None:
    """One call waits, the others are told at once; thawed, what was begun is done."""
    tier = DiskTier(disk.path / operation, max_bytes=1 << 20, max_files=100)
    for name in ("old", "late"):
        tier.put_pending(name, b"x")
    began = time.monotonic()
    with disk.frozen():
        tier.deadline.limit_s = 0.3
        with pytest.raises(S3CacheError, match="file system of"):
            OPERATIONS[operation](tier)
        for _ in range(100):
            with pytest.raises(S3CacheError, match="hangs"):
                tier.put("more", b"x")
            with pytest.raises(S3CacheError, match="hangs"):
                tier.get("old")
    assert time.monotonic() - began < LONG_S
    tier.deadline.limit_s = LONG_S  # a busy disk may take longer than one that is frozen may
    eventually(lambda: succeeds(lambda: tier.put("later", b"x")))
    assert tier.get("later") == b"x"
    assert tier.usage().files == len([*tier.objects()])
    tier.close()


def succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except S3CacheError:
        return False
    return True


@pytest.mark.usefixtures("impatient")
def test_on_a_frozen_disk_a_cache_is_one_without_a_disk(
    disk: FreezableDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves go through memory and are not durable, lookups ask the remote, and it is said once."""
    remote = MemoryStore()
    cache = open_cache(disk.path / "cache", remote)
    cache.save(KEY, entry())
    assert cache.flush(LONG_S).complete
    began = time.monotonic()
    with disk.frozen():
        for number in range(20):
            saved = cache.save(f"key{number}", entry(f"key{number}"))
            assert isinstance(saved, Saved)
            assert not saved.durable
        for _ in range(20):
            assert isinstance(cache.lookup(KEY), Hit)
            assert isinstance(cache.lookup("absent"), Miss)
        assert cache.flush(LONG_S).complete
        assert cache.stats().uploaded == 21
        cache.close(LONG_S)
    assert time.monotonic() - began < LONG_S
    assert len(caplog.records) == 1
    assert "file system" in caplog.text


def test_a_fork_does_not_wait_for_a_frozen_disk(disk: FreezableDisk) -> None:
    """... on which another thread opens the files that no child may keep."""
    script = """
        from s3cache.util.deadline import DeadlineExecutor
        from s3cache.tier import DiskTier, DiskTier

        DeadlineExecutor.limit_s = 0.3
        tier = DiskTier(sys.argv[1], max_bytes=1 << 20, max_files=100)
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            tier.usage()
        except Exception as exc:
            print(exc, flush=True)
        child = os.fork()
        if child == 0:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        """
    with started(script, disk.path / "forks") as process:
        assert line(process) == "ready"
        (disk.path / "forks" / "usage").unlink()
        with disk.frozen():
            tell(process)
            assert "has not answered" in line(process)
            assert line(process) == "7"


STUBBORN = """
    import asyncio, atexit, threading, time
    from s3cache import Cache, frame
    from s3cache.store import MemoryStore
    from s3cache.settings import Settings

    class Stubborn(MemoryStore):
        async def put(self, *args, **more):
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass

        get = aclose = put

    def save(key):
        cache.save(key, frame.encode(kind="test", key=key, sections={"code": b"x"}))

    began = 0.0
    atexit.register(lambda: print("bye", time.monotonic() - began, flush=True))
    where = Settings(local_dir=sys.argv[1], exit_timeout_s=0.1, lookup_timeout_s=0.1)
    cache = Cache(where, open_remote=Stubborn, identity="place")
    save("key")
    cache.lookup("absent")
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(8):
        threading.Thread(target=save, args=(f"more{number}",), daemon=True).start()
    began = time.monotonic()
    """


def test_all_that_hangs_at_an_exit_hangs_together(disk: FreezableDisk) -> None:
    """Uploads, downloads, the connection and the disk: one limit for them, not one for each."""
    with started(STUBBORN, disk.path / "stubborn") as process:
        assert line(process) == "ready"
        with disk.frozen():
            tell(process)
            word, seconds = line(process).split()
        assert word == "bye"
        assert float(seconds) < LONG_S


@pytest.mark.usefixtures("impatient")
def test_a_directory_that_hangs_from_the_start_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dead").mkdir()
    with dead_mount(tmp_path / "dead"):
        cache = open_cache(tmp_path / "dead" / "cache", MemoryStore())
        saved = cache.save(OTHER, entry(OTHER))
        assert isinstance(saved, Saved)
        assert not saved.durable
        assert isinstance(cache.lookup(KEY), Miss)
        assert cache.flush(LONG_S).complete
        assert "there is no local tier" in caplog.text
        with pytest.raises(S3CacheError, match="file system of"):
            FileStore(tmp_path / "dead" / "store")
        cache.close()


@pytest.mark.usefixtures("impatient")
def test_a_home_that_hangs_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The local tier goes to the temporary directory, and it is said."""
    (tmp_path / "dead").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "dead" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with dead_mount(tmp_path / "dead"):
        with Cache.open() as cache:
            saved = cache.save(KEY, entry())
            assert isinstance(saved, Saved)
            assert saved.durable
        began = time.monotonic()
        for _ in range(100):
            assert Settings().local_dir.startswith(str(tmp_path / "tmp"))
        assert time.monotonic() - began < LONG_S
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("impatient")
def test_a_signing_key_on_a_hanging_disk_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    with dead_mount(tmp_path / "dead"), pytest.raises(ConfigError, match="signing key"):
        Cache.open(local=False, signing_key=tmp_path / "dead" / "key")


@pytest.mark.usefixtures("impatient")
def test_a_remote_directory_that_hangs_holds_up_nobody_else(
    disk: FreezableDisk, tmp_path: Path
) -> None:
    """The threads for what blocks are few, and all caches of a process share them."""
    theirs = open_cache(tmp_path / "theirs", FileStore(disk.path / "remote"))
    ours = open_cache(tmp_path / "ours", MemoryStore())
    theirs.save(KEY, entry())
    assert theirs.flush(LONG_S).complete
    began = time.monotonic()
    with disk.frozen():
        for number in range(40):
            theirs.save(f"key{number}", entry(f"key{number}"))
        assert not theirs.flush(2.0).complete
        for number in range(40):
            ours.save(f"key{number}", entry(f"key{number}"))
        assert ours.flush(LONG_S / 2).complete
        assert isinstance(theirs.lookup(KEY), Hit)  # it is here
    assert time.monotonic() - began < LONG_S
    eventually(lambda: theirs.flush(LONG_S).complete)
    assert theirs.stats().uploaded == 41
    ours.close()
    theirs.close()


@contextlib.contextmanager
def started(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A process with a script; it has ended well at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", "import os, sys\n" + textwrap.dedent(script), *map(str, args)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    ) as process:
        try:
            yield process
            assert process.wait(LONG_S) == 0
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
