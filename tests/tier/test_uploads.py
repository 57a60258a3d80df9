"""Uploads: acknowledged before they are sent, bounded, and never lost."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest

from s3cache.errors import ClosedError, NoSpaceError
from s3cache.stats import TransferEvent
from s3cache.tier import DiskTier, FlushReport
from tests.support.waiting import LONG_S, eventually, in_thread, tasks_on
from tests.tier.sites import MIB, NewSite, Remote, Site


def test_a_listener_that_waits_for_uploads_fails_instead_of_hanging(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    def wait(_: TransferEvent) -> None:
        site.uploads.flush(None)

    site.listeners.add(wait)
    site.put("one")
    assert site.uploads.flush(20).complete
    assert "wait for itself" in caplog.text


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


def test_an_object_replaced_while_it_is_uploaded_is_uploaded_again(
    site: Site, remote: Remote
) -> None:
    remote.is_open = False
    site.put("one", b"old")
    eventually(lambda: remote.waiting)
    site.put("one", b"new")
    remote.is_open = True
    assert site.uploads.flush(20).complete
    assert remote.objects == {"one": b"new"}
    assert remote.puts["one"] == 2


def test_an_object_that_another_process_replaced_is_uploaded_before_the_exit(
    new_site: NewSite, remote: Remote
) -> None:
    """Two ranks of a job save one entry, and each one's bytes differ a little."""
    ours, theirs = new_site(), new_site()
    assert theirs.tier is not None
    remote.is_open = False
    ours.put("one", b"ours")
    eventually(lambda: remote.waiting)
    theirs.tier.put_pending("one", b"theirs")
    remote.is_open = True
    assert ours.uploads.flush(20, until_a_pause=True).complete
    assert remote.objects == {"one": b"theirs"}


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
