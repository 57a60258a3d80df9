"""Uploads: acknowledged before the network, bounded, and none of them lost."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import ClosedError, NoSpaceError
from s3cache.stats import TransferEvent
from s3cache.tier import DiskTier, FlushReport
from tests.support.waiting import LONG_S, eventually, in_thread, tasks_on
from tests.tier.sites import MIB, Remote, Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from s3cache.store import Buffer


def test_a_put_is_durable_and_waits_for_no_network(site: Site, remote: Remote) -> None:
    remote.is_open = False
    site.put("one")
    assert site.tier is not None
    assert site.tier.get("one") == b"data"
    assert site.tier.pending() == ["one"]
    assert remote.objects == {}
    remote.is_open = True
    assert site.uploads.flush(20) == FlushReport(0, 0, None)
    assert remote.objects == {"one": b"data"}
    assert site.tier.pending() == []


def test_its_steps_can_be_watched(site: Site) -> None:
    site.put("one", b"12345")
    site.uploads.flush(20)
    assert site.steps("one") == ["queued", "started", "done"]
    assert {(event.direction, event.size) for event in site.events} == {("upload", 5)}


def test_a_listener_that_waits_for_uploads_fails_instead_of_hanging(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    def wait(_: TransferEvent) -> None:
        site.uploads.flush(None)

    site.listeners.add(wait)
    site.put("one")
    assert site.uploads.flush(20).complete
    assert "wait for itself" in caplog.text


def test_only_so_many_at_once(new_site: Callable[..., Site], remote: Remote) -> None:
    site = new_site(concurrency=3)
    remote.is_open = False
    for number in range(10):
        site.put(f"{number}")
    eventually(lambda: len(remote.waiting) == 3)
    remote.is_open = True
    assert site.uploads.flush(20).complete
    assert remote.most_waiting == 3
    assert len(remote.objects) == 10


def test_only_so_many_bytes_at_once_also_of_what_is_found(
    new_site: Callable[..., Site], remote: Remote
) -> None:
    first = new_site()
    remote.is_open = False
    for number in range(6):
        first.put(f"{number}", bytes(1000))
    first.close()
    second = new_site(max_bytes=2500)
    remote.is_open = True
    second.put("own", b"")
    eventually(lambda: "own" in remote.objects)  # which proves that it may write
    remote.is_open = False
    remote.most_waiting_bytes = 0
    second.uploads.start()
    eventually(lambda: len(remote.waiting) == 2)
    remote.is_open = True
    assert second.uploads.flush(20).complete
    assert len(remote.objects) == 7
    assert remote.most_waiting_bytes == 2000


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


def test_an_object_that_another_process_replaced_does_not_outlive_the_exit(
    new_site: Callable[..., Site], remote: Remote
) -> None:
    """Two ranks of a job save one entry, and each one's bytes differ a little."""
    ours, theirs = new_site(), new_site()
    assert theirs.tier is not None
    remote.is_open = False
    ours.put("one", b"ours")
    eventually(lambda: remote.waiting)
    theirs.tier.put_pending("one", b"theirs")
    remote.is_open = True
    assert ours.uploads.flush_while_it_works(20).complete
    assert remote.objects == {"one": b"theirs"}


def test_an_object_being_replaced_keeps_its_record(
    site: Site, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload of the old bytes that ends in the middle of a put does not forget the new ones."""
    assert site.tier is not None
    remote.is_open = False
    site.put("one", b"old")
    eventually(lambda: remote.waiting)
    replacing, go_on = threading.Event(), threading.Event()
    put_pending = site.tier.put_pending

    def slow(name: str, data: Buffer) -> None:
        # The record of the new bytes is there, the bytes are not: what is read now is old.
        put_pending(name, b"old")
        replacing.set()
        assert go_on.wait(LONG_S)
        put_pending(name, data)

    monkeypatch.setattr(site.tier, "put_pending", slow)
    join = in_thread(lambda: site.put("one", b"new"))
    assert replacing.wait(LONG_S)
    remote.is_open = True
    eventually(lambda: remote.puts["one"] == 1)
    remote.is_open = False
    go_on.set()
    join()
    assert site.tier.pending() == ["one"]
    remote.is_open = True
    assert site.uploads.flush(20).complete
    assert remote.objects == {"one": b"new"}


def test_records_made_before_there_was_a_queue_are_uploaded(site: Site, remote: Remote) -> None:
    assert site.tier is not None
    site.tier.put_pending("one", b"data")
    elsewhere = DiskTier(site.tier.root, namespace="other", max_bytes=MIB, max_files=10)
    elsewhere.put_pending("one", b"of another place")
    elsewhere.close()
    site.uploads.start()
    eventually(lambda: remote.objects == {"one": b"data"})


def test_without_a_tier_bytes_wait_in_memory(new_site: Callable[..., Site], remote: Remote) -> None:
    site = new_site(local=False)
    remote.is_open = False
    buffer = bytearray(b"data")
    site.uploads.put_in_memory("one", buffer)
    buffer[:] = b"used"  # again, for something else
    assert site.uploads.flush(0.01) == FlushReport(1, 1, None)
    remote.is_open = True
    assert site.uploads.flush(20) == FlushReport(0, 0, None)
    assert remote.objects == {"one": b"data"}


def test_memory_is_bounded_by_bytes_and_count(
    new_site: Callable[..., Site], remote: Remote
) -> None:
    site = new_site(local=False, max_count=3, max_bytes=100)
    remote.is_open = False
    for number in range(3):
        site.uploads.put_in_memory(f"{number}", bytes(30))
    with pytest.raises(NoSpaceError, match="3 objects of 90 bytes"):
        site.uploads.put_in_memory("4", b"")
    with pytest.raises(NoSpaceError):
        site.uploads.put_in_memory("2", bytes(41))
    site.uploads.put_in_memory("2", bytes(40))  # in place of the other, so it fits
    remote.is_open = True
    assert site.uploads.flush(20).complete
    site.uploads.put_in_memory("5", bytes(100))  # there is room again
    assert site.uploads.flush(20).complete
    assert len(remote.objects["2"]) == 40


def test_what_is_on_disk_supersedes_what_waits_in_memory(site: Site, remote: Remote) -> None:
    remote.is_open = False
    for number in range(4):
        site.put(f"busy{number}")
    eventually(lambda: len(remote.waiting) == 4)
    site.uploads.put_in_memory("one", b"old")
    site.put("one", b"new")
    remote.is_open = True
    assert site.uploads.flush(20) == FlushReport(0, 0, None)
    assert remote.objects["one"] == b"new"


# -- closing


def test_closing_releases_a_flush_and_leaves_the_records(
    new_site: Callable[..., Site], remote: Remote
) -> None:
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


def test_once_closed_nothing_is_taken_and_nothing_starts(site: Site, remote: Remote) -> None:
    assert site.tier is not None
    remote.is_open = False
    site.put("one")
    site.uploads.start()
    site.uploads.close()
    with pytest.raises(ClosedError):
        site.put("two")
    with pytest.raises(ClosedError):
        site.uploads.put_in_memory("two", b"data")
    assert site.tier.get("two") is None
    site.uploads.start()  # which would find its record
    remote.is_open = True
    assert not site.uploads.flush(0.05).complete
    assert remote.objects == {}


def test_closing_cancels_again_where_a_cancellation_gets_lost() -> None:
    """As asyncio.wait_for loses it when it comes together with the result."""
    entered = threading.Event()
    lost: list[str] = []

    class Losing(Remote):
        async def publish(self, name: str, data: Buffer, note: bytes | None = None) -> bool:
            try:
                entered.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(name)
            await asyncio.Event().wait()
            return True

    site = Site(None, Losing())
    site.uploads.put_in_memory("one", b"data")
    assert entered.wait(LONG_S)
    site.uploads.close()
    assert lost == ["one"]
    eventually(lambda: tasks_on(site.loop) == 0)
    site.close()
