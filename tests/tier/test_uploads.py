"""Uploads: acknowledged before they are sent, bounded, tried again, and never lost."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from pathlib import Path

import pytest

from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    CorruptError,
    NoSpaceError,
    TransientError,
    UntrustedError,
)
from s3cache.tier import DiskTier, FlushReport
from tests.support.scripts import run_script
from tests.support.waiting import LONG_S, eventually, in_thread, tasks_on
from tests.tier.sites import MIB, NewSite, Remote, Site


def test_concurrent_uploads_are_bounded(new_site: NewSite, remote: Remote) -> None:
    site = new_site(upload_concurrency=3)
    remote.is_open = False
    for number in range(10):
        site.put(f"{number}")
    eventually(lambda: len(remote.waiting) == 3)
    remote.is_open = True
    assert site.uploads.flush(20).complete
    assert remote.most_waiting == 3
    assert len(remote.objects) == 10


@pytest.mark.parametrize("by_another", [False, True])
def test_an_object_replaced_while_it_is_uploaded_is_uploaded_again(
    new_site: NewSite, remote: Remote, by_another: bool
) -> None:
    """Two ranks of a job may save one entry, and each one's bytes differ a little."""
    ours, theirs = new_site(), new_site()
    remote.is_open = False
    ours.put("one", b"old")
    eventually(lambda: remote.waiting)
    if by_another:
        assert theirs.tier is not None
        theirs.tier.put_pending("one", b"new")
    else:
        ours.put("one", b"new")
    remote.is_open = True
    assert ours.uploads.flush(20, until_a_pause=by_another).complete
    assert remote.objects == {"one": b"new"}
    assert remote.puts["one"] == 2


def test_without_a_tier_bytes_wait_in_memory(new_site: NewSite, remote: Remote) -> None:
    site = new_site(local=False)
    remote.is_open = False
    buffer = bytearray(b"data")
    site.uploads.add("one", buffer)
    buffer[:] = b"used"  # the buffer is reused
    assert site.uploads.flush(0.01) == FlushReport(1, 1, None)
    remote.is_open = True
    assert site.uploads.flush(20) == FlushReport(0, 0, None)
    assert remote.objects == {"one": b"data"}


def test_memory_is_bounded_by_bytes_and_count(new_site: NewSite, remote: Remote) -> None:
    site = new_site(local=False, upload_queue_max_count=3, upload_queue_max_bytes=100)
    remote.is_open = False
    for number in range(3):
        site.uploads.add(f"{number}", bytes(30))
    with pytest.raises(NoSpaceError, match="3 objects of 90 bytes"):
        site.uploads.add("4", b"")
    with pytest.raises(NoSpaceError):
        site.uploads.add("2", bytes(41))
    site.uploads.add("2", bytes(40))  # in place of the other, so it fits
    remote.is_open = True
    assert site.uploads.flush(20).complete
    site.uploads.add("5", bytes(100))  # there is room again
    assert site.uploads.flush(20).complete
    assert len(remote.objects["2"]) == 40


def keep_busy(site: Site, remote: Remote) -> None:
    """Let all workers upload objects to a remote that does not answer."""
    remote.is_open = False
    for number in range(4):
        site.put(f"busy{number}")
    eventually(lambda: len(remote.waiting) == 4)


def test_an_object_on_disk_supersedes_the_same_object_in_memory(site: Site, remote: Remote) -> None:
    keep_busy(site, remote)
    site.uploads.add("one", b"old")
    site.put("one", b"new")
    remote.is_open = True
    assert site.uploads.flush(20) == FlushReport(0, 0, None)
    assert remote.objects["one"] == b"new"


# -- a cleaner of temporary files


def saved_while_the_remote_is_down(site: Site, remote: Remote) -> Path:
    """Save five objects, of which none is uploaded; return the root of their tier."""
    assert site.tier is not None
    keep_busy(site, remote)
    for number in range(5):
        site.put(f"{number}")
    return Path(site.tier.root)


@pytest.mark.parametrize("everything", [False, True])
def test_objects_that_vanished_are_counted_and_warned_of_once(
    site: Site, remote: Remote, everything: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = saved_while_the_remote_is_down(site, remote)
    for number in range(1, 5):
        (root / "objects" / "ns+" / f"{number}").unlink()
    if everything:
        shutil.rmtree(root / "pending")
    remote.is_open = True
    report = site.uploads.flush(20)
    assert (report.remaining, report.vanished, report.complete) == (0, 4, False)
    assert not site.uploads.flush(20).complete
    (warning,) = [record.getMessage() for record in caplog.records if "vanished" in record.message]
    assert f"vanished from {root} before their upload, and are lost: 4" in warning
    assert "set local_dir" in warning
    assert remote.objects.keys() == {"busy0", "busy1", "busy2", "busy3", "0"}


@pytest.mark.parametrize("is_removed", [False, True])
def test_objects_without_records_and_removed_ones_are_not_lost(
    site: Site, remote: Remote, is_removed: bool
) -> None:
    """A record is an empty file, and the oldest one of its object."""
    root = saved_while_the_remote_is_down(site, remote)
    assert site.tier is not None
    if is_removed:
        site.tier.delete("0")
    else:
        shutil.rmtree(root / "pending")
    remote.is_open = True
    assert site.uploads.flush(20) == FlushReport(0, 0, None)
    assert len(remote.objects) == 9 - is_removed


# -- closing


def test_a_delayed_upload_waits_until_a_flush(new_site: NewSite, remote: Remote) -> None:
    for local in (True, False):
        site = new_site(local=local)
        if site.tier is not None:
            site.tier.put_pending("sent", b"data")
        site.uploads.add("sent", None if local else b"data", delay_s=3_600.0)
        assert site.uploads.pending == 1
        assert remote.objects == {}
        assert site.uploads.flush(20) == FlushReport(0, 0, None)
        assert remote.objects == {"sent": b"data"}
        remote.objects.clear()
    site.uploads.add("soon", b"data", delay_s=0.01)
    eventually(lambda: remote.objects == {"soon": b"data"})


def test_a_search_for_pending_uploads_leaves_a_delayed_one_that_is_being_saved(
    site: Site, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert site.tier is not None
    searches = []
    pending = site.tier.pending

    def search() -> object:
        searches.append(pending())
        return searches[-1]

    monkeypatch.setattr(site.tier, "pending", search)
    with site.uploads.saving("one"):
        site.tier.put_pending("one", b"data")
        site.uploads.start()
        eventually(lambda: searches)
        site.loop.wait(asyncio.sleep(0.05), LONG_S)
        site.uploads.add("one", delay_s=3_600.0)
    assert site.uploads.cancel_delayed("one")
    assert remote.objects == {}


def test_closing_releases_a_flush_and_leaves_the_records(new_site: NewSite, remote: Remote) -> None:
    site = new_site()
    remote.is_open = False
    site.put("one")
    eventually(lambda: remote.waiting)
    join = in_thread(lambda: site.uploads.flush(None))
    eventually(lambda: tasks_on(site.loop) == 4 + 2)  # workers, adopter, flush
    site.close()
    assert join().remaining == 1
    remote.is_open = True
    assert new_site().uploads.flush(20).complete
    assert remote.objects == {"one": b"data"}


def test_once_closed_nothing_is_kept_in_memory_and_nothing_starts(
    site: Site, remote: Remote
) -> None:
    remote.is_open = False
    site.put("one")
    site.uploads.close(5)
    site.put("two")
    with pytest.raises(ClosedError):
        site.uploads.add("three", b"data")
    site.uploads.start()  # it would find the records
    remote.is_open = True
    assert site.uploads.flush(0.05).remaining == 2
    assert remote.objects == {}


def test_closing_cancels_again_if_a_cancellation_is_lost() -> None:
    """``asyncio.wait_for`` loses a cancellation that comes together with the result."""
    entered = threading.Event()
    lost: list[str] = []

    class Losing(Remote):
        async def publish(self, name: str, verified: object) -> None:
            try:
                entered.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(name)
            await asyncio.Event().wait()

    site = Site(None, Losing())
    site.uploads.add("one", b"data")
    assert entered.wait(LONG_S)
    site.uploads.close(5)
    assert lost == ["one"]
    eventually(lambda: tasks_on(site.loop) == 0)
    site.close()


def test_records_that_are_older_than_the_queue_are_uploaded(site: Site, remote: Remote) -> None:
    assert site.tier is not None
    site.tier.put_pending("one", b"data")
    elsewhere = DiskTier(site.tier.root, namespace="other", max_bytes=MIB, max_files=10)
    elsewhere.put_pending("one", b"of another place")
    elsewhere.close()
    site.uploads.start()
    eventually(lambda: remote.objects == {"one": b"data"})


def test_a_failure_that_may_pass_is_tried_again_after_a_pause(site: Site, remote: Remote) -> None:
    remote.errors["one"] = [TransientError("reset")]
    site.put("one", b"12345")
    eventually(lambda: site.steps("one")[-1:] == ["done"])
    assert site.steps("one") == ["queued", "started", "retried", "started", "done"]
    assert (site.events[-1].direction, site.events[-1].size) == ("upload", 5)
    assert [str(each) for each in site.problems] == ["reset"]


def test_uploads_that_fail_together_pause_once(new_site: NewSite, remote: Remote) -> None:
    """Eight failures in one outage do not make the pause 64 times as long."""
    site = new_site(upload_concurrency=8)
    remote.is_open = False
    for number in range(8):
        remote.errors[f"{number}"] = [TransientError("outage")]
        site.put(f"{number}")
    eventually(lambda: len(remote.waiting) == 8)
    remote.is_open = True
    eventually(lambda: len(site.problems) == 8)
    assert site.uploads.pause_s == 1.0
    eventually(lambda: len(remote.objects) == 8)


def test_a_flush_cuts_a_pause_short_and_the_exit_does_not_wait_for_its_end(
    site: Site, remote: Remote
) -> None:
    site.uploads.pause_s = 30.0  # as after many failures
    remote.errors["one"] = [TransientError("reset")] * 2
    site.put("one")
    eventually(lambda: site.problems)
    started = time.monotonic()
    report = site.uploads.flush(2 * LONG_S, until_a_pause=True)
    assert time.monotonic() - started < LONG_S
    assert (report.remaining, report.in_memory) == (1, 0)
    assert isinstance(report.error, TransientError)
    assert site.uploads.flush(20).complete


@pytest.mark.parametrize(
    "error", [AccessDeniedError("expired"), NoSpaceError("quota"), RuntimeError("bug")], ids=str
)
def test_refused_uploads_are_tried_again_without_a_flush(
    site: Site, remote: Remote, error: Exception
) -> None:
    """The clock, the token or the bucket may be right again later. Other uploads go first."""
    remote.errors["bad"] = [error] * 2
    for name in ("bad", "good"):
        site.put(name)
    eventually(lambda: set(remote.objects) == {"bad", "good"})
    eventually(lambda: site.uploads.pending == 0)
    assert site.steps("bad").count("failed") == 2
    assert len(site.problems) == 2


def test_a_few_of_many_refused_uploads_are_tried_at_once(new_site: NewSite, remote: Remote) -> None:
    """They are tried less and less often, each in turn."""
    site = new_site(upload_concurrency=2)
    for number in range(20):
        remote.errors[f"{number}"] = [AccessDeniedError("expired")] * 9
        site.put(f"{number}")
    eventually(lambda: site.uploads.pause_s >= 4.0)
    failed = [event.name for event in site.events if event.step == "failed"]
    assert len(failed) <= 3 * 2 + 2
    assert len({*failed}) > 2


@pytest.mark.parametrize("at_exit", [False, True])
def test_a_flush_tries_all_refused_uploads(site: Site, remote: Remote, at_exit: bool) -> None:
    """A flush is the last chance if the disk is removed with its pod."""
    for number in range(20):
        remote.errors[f"{number}"] = [AccessDeniedError("expired")]
        site.put(f"{number}")
    site.uploads.flush(20, until_a_pause=at_exit)
    assert site.uploads.flush(20, until_a_pause=at_exit) == FlushReport(0, 0, None)
    assert len(remote.objects) == 20


def test_a_flush_ends_even_if_every_thread_hangs(site: Site, remote: Remote) -> None:
    """Threads hang like this in name lookups without a server."""
    remote.is_open = False
    site.put("one")
    site.put("two")
    eventually(lambda: len(remote.waiting) == 2)
    may_end = threading.Event()

    async def hang() -> None:
        for _ in range(100):
            asyncio.get_running_loop().run_in_executor(None, may_end.wait)

    site.loop.wait(hang(), 20)
    try:
        assert in_thread(lambda: site.uploads.flush(0.01))().remaining == 2
    finally:
        may_end.set()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_corrupt_object_is_set_aside_unless_it_was_replaced_meanwhile(
    site: Site, remote: Remote, is_replaced: bool
) -> None:
    assert site.tier is not None
    remote.is_open = False
    remote.errors["one"] = [CorruptError("section", "bit rot")]
    site.put("one", b"rotten")
    eventually(lambda: remote.waiting)
    if is_replaced:
        site.put("one", b"fresh")
    remote.is_open = True
    assert site.uploads.flush(20).complete
    assert remote.objects == ({"one": b"fresh"} if is_replaced else {})
    assert site.tier.get("one") == (b"fresh" if is_replaced else None)
    assert site.tier.pending() == []
    assert "failed" in site.steps("one")


@pytest.mark.parametrize(
    "method", ["delete", "forget_uploaded", "pending_object", "pending", "adopt"]
)
def test_uploads_continue_after_the_tier_fails_for_a_while(
    site: Site, remote: Remote, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    assert site.tier is not None

    def fail(*_: object) -> None:
        raise AccessDeniedError("tier failed", op=method)

    remote.errors["corrupt"] = [CorruptError("section", "bit rot")]
    with monkeypatch.context() as patch:
        patch.setattr(site.tier, method, fail)
        for number in range(8):
            site.put(f"{number}")
        site.put("corrupt")
        site.uploads.flush(1)
    assert site.uploads.flush(20).complete
    for number in range(8):
        assert f"{number}" in remote.objects


# -- uploads that other processes have left


def opened(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "tier", namespace="ns", max_bytes=256 * MIB, max_files=10_000)


def left_behind(tmp_path: Path, count: int) -> None:
    """Save ``count`` objects, and end before their upload."""
    tier = opened(tmp_path)
    for number in range(count):
        tier.put_pending(f"{number}", b"data")
    tier.close()


def assert_left_to_others(tmp_path: Path, count: int) -> None:
    successor = opened(tmp_path)
    eventually(lambda: successor.adopt() == [] and len(successor.pending()) == count)
    successor.close()


def test_a_process_without_write_permission_tries_a_few_and_leaves_all(
    tmp_path: Path, site: Site, remote: Remote
) -> None:
    remote.errors = {f"{number}": [AccessDeniedError("no")] * 99 for number in range(30)}
    left_behind(tmp_path, 30)
    assert site.uploads.flush(20).remaining == 0
    assert len(site.problems) <= 8  # its concurrency, or twice that
    assert_left_to_others(tmp_path, 30)
    remote.errors.clear()  # the next flush tries again
    assert site.uploads.flush(20).complete
    assert len(remote.objects) == 30


@pytest.mark.parametrize(
    "error",
    [UntrustedError("unsigned", "nobody signed it"), ConfigError("key", "is not here", "give it")],
    ids=["not trusted", "a key of theirs"],
)
def test_adopted_uploads_that_fail_here_do_not_block_others(
    tmp_path: Path, site: Site, remote: Remote, error: Exception
) -> None:
    """A flush tries each once. An untrusted entry waits for a process that trusts it."""
    remote.errors = {f"{number}": [error] * 9 for number in range(10, 40)}
    left_behind(tmp_path, 40)
    assert site.uploads.flush(60).complete
    assert bool(site.problems) == isinstance(error, ConfigError)
    assert sorted(remote.objects) == [f"{number}" for number in range(10)]
    assert {*remote.adopted.values()} == {True}
    del remote.errors["20"]
    site.put("20", b"fresh")  # saved here too, so it is ours now
    assert site.uploads.flush(20).complete
    assert remote.objects["20"] == b"fresh"
    assert_left_to_others(tmp_path, 29)


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_flush_retries_an_upload_that_started_before_it_and_is_refused(
    is_adopted: bool, tmp_path: Path, site: Site, remote: Remote
) -> None:
    """The attempt started before the flush, perhaps before the cause was corrected."""
    remote.is_open, remote.errors = False, {"0": [AccessDeniedError("no")]}
    if is_adopted:
        left_behind(tmp_path, 1)
        site.uploads.start()
    else:
        site.put("0")
    eventually(lambda: remote.waiting == {"0"})
    flushed = in_thread(lambda: site.uploads.flush(20))
    time.sleep(0.1)  # it has begun
    remote.is_open = True
    assert flushed().complete
    assert [*remote.objects] == ["0"]


# -- without threads

_NO_THREADS = """
from s3cache.tier import DiskTier

def refuse(*_):
    raise RuntimeError("can't start new thread")

start, threading.Thread.start = threading.Thread.start, refuse
cache = open_cache(sys.argv[1], MemoryStore("place"))
for number in range(3):
    print(type(cache.save(f"key{number}", entry(f"key{number}"))).__name__)
report = cache.flush(5)
print(report.remaining, report.complete, report.error)
threading.Thread.start = start
print(cache.flush(20).complete)
print(cache.lookup("key0").tier)
cache.close(0)
"""


def test_a_flush_that_gets_no_thread_reports_remaining_uploads(tmp_path: Path) -> None:
    """Uploads continue as soon as a thread can start."""
    lines = run_script(_NO_THREADS, tmp_path).stdout.splitlines()
    assert lines[:3] == ["Saved"] * 3
    assert lines[3].startswith("3 False ")
    assert "can't start new thread" in lines[3]
    assert lines[4:] == ["True", "local"]


def test_the_record_of_a_missing_object_is_removed(site: Site, remote: Remote) -> None:
    assert site.tier is not None
    site.tier.put_pending("gone", b"data")
    (Path(site.tier.root) / "objects" / "ns+" / "gone").unlink()
    assert site.uploads.flush(20).remaining == 0
    assert site.tier.pending() == []
    assert site.steps("gone") == ["queued", "started", "absent"]
    assert remote.objects == {}
