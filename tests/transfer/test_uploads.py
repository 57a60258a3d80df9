"""Uploads: acknowledged before the network, bounded, retried, and none of them lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    CorruptError,
    NoSpaceError,
    TransientError,
)
from s3cache.stats import Listeners, TransferEvent
from s3cache.tier import DiskTier
from s3cache.transfer import (
    BackgroundLoop,
    FlushReport,
    UploadLimits,
    Uploads,
)
from tests.support.scripts import run_script
from tests.support.waiting import eventually, in_thread, tasks_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from s3cache.store import Buffer

MIB = 1 << 20


class Remote:
    """Where uploads go: closed it lets them wait, and it fails as often as it is told to."""

    def __init__(self) -> None:
        self.is_open = True
        self.objects: dict[str, bytes] = {}
        self.puts: Counter[str] = Counter()
        self.errors: dict[str, list[Exception]] = {}
        self.waiting: set[str] = set()
        self.waiting_bytes = 0
        self.most_waiting = self.most_waiting_bytes = 0

    async def publish(self, name: str, data: Buffer) -> None:
        self.waiting.add(name)
        self.waiting_bytes += len(data)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        self.most_waiting_bytes = max(self.most_waiting_bytes, self.waiting_bytes)
        try:
            while not self.is_open:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0)
        finally:
            self.waiting.discard(name)
            self.waiting_bytes -= len(data)
        if errors := self.errors.get(name):
            raise errors.pop(0)
        self.puts[name] += 1
        self.objects[name] = bytes(data)


class Site:
    """One process: a loop, a tier and uploads from it."""

    def __init__(self, tier: DiskTier | None, remote: Remote, **limits: int) -> None:
        self.loop = BackgroundLoop()
        self.tier = tier
        self.remote = remote
        self.events: list[TransferEvent] = []
        self.problems: list[Exception] = []
        self.listeners = Listeners()
        self.listeners.add(self.events.append)
        self.uploads = Uploads(
            self.loop,
            remote.publish,
            disk=tier,
            limits=UploadLimits(
                **{"concurrency": 4, "max_count": 100, "max_bytes": 64 * MIB, **limits}
            ),
            listeners=self.listeners,
            on_problem=self.problems.append,
        )

    def put(self, name: str, data: bytes = b"data") -> None:
        assert self.tier is not None
        self.uploads.put(name, data)

    def steps(self, name: str) -> list[str]:
        return [event.step for event in self.events if event.name == name]

    def close(self) -> None:
        self.uploads.close()
        if self.tier is not None:
            self.tier.close()
        self.loop.stop()


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
def new_site(tmp_path: Path, remote: Remote) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def new(**limits: Any) -> Site:
        tier = None
        if limits.pop("local", True):
            tier = DiskTier(
                tmp_path / "tier", namespace="ns", max_bytes=256 * MIB, max_files=10_000
            )
        sites.append(Site(tier, remote, **limits))
        return sites[-1]

    yield new
    remote.is_open = True
    for site in sites:
        site.close()


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    return new_site()


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


def test_a_listener_that_fails_is_removed_and_hurts_nobody(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def fail(event: TransferEvent) -> None:
        calls.append(event)
        raise ValueError("bar broken")

    site.listeners.add(fail)
    site.put("one")
    assert site.uploads.flush(20).complete
    assert len(calls) == 1
    assert site.steps("one") == ["queued", "started", "done"]
    assert "a transfer listener failed" in caplog.text


def test_a_listener_that_waits_for_uploads_is_told_so_instead_of_hanging(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.listeners.add(lambda event: site.uploads.flush(None))
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
    remote.most_waiting_bytes = 0
    second = new_site(max_bytes=3000)  # a quarter of it is for what is put there
    second.uploads.start()
    eventually(lambda: len(remote.waiting) == 2)
    remote.is_open = True
    assert second.uploads.flush(20).complete
    assert len(remote.objects) == 6
    assert remote.most_waiting_bytes == 2000


def test_one_that_is_larger_than_the_bound_goes_alone(
    new_site: Callable[..., Site], remote: Remote
) -> None:
    site = new_site(max_bytes=100)
    for number in range(4):
        site.put(f"{number}", bytes(1000))
    assert site.uploads.flush(20).complete
    assert remote.most_waiting == 1


def test_what_does_not_fit_the_queue_is_picked_up_later(
    new_site: Callable[..., Site], remote: Remote
) -> None:
    site = new_site(max_count=3, concurrency=2)
    remote.is_open = False
    for number in range(30):
        site.put(f"{number}")
    eventually(lambda: len(remote.waiting) == 2)
    assert site.uploads.pending <= 5
    remote.is_open = True
    assert site.uploads.flush(20).complete
    assert remote.puts == {f"{number}": 1 for number in range(30)}


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


def test_an_object_being_replaced_keeps_its_record(
    site: Site, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload of the old bytes that ends in the middle of a put does not forget the new ones."""
    assert site.tier is not None
    site.put("one", b"old")
    assert site.uploads.flush(20).complete
    replacing, go_on = threading.Event(), threading.Event()
    put_pending = site.tier.put_pending

    def slow(name: str, data: Buffer) -> None:
        # The record of the new bytes is there, the bytes are not: what is read now is old.
        put_pending(name, b"old")
        replacing.set()
        assert go_on.wait(20)
        put_pending(name, data)

    monkeypatch.setattr(site.tier, "put_pending", slow)
    remote.is_open = False
    join = in_thread(lambda: site.put("one", b"new"))
    assert replacing.wait(20)
    site.uploads.start()  # looks for records
    eventually(lambda: remote.waiting)
    remote.is_open = True
    eventually(lambda: remote.puts["one"] == 2)
    remote.is_open = False
    go_on.set()
    join()
    assert site.tier.pending() == ["one"]
    remote.is_open = True
    assert site.uploads.flush(20).complete
    assert remote.objects == {"one": b"new"}


def test_a_failed_replacement_leaves_the_first_put_to_be_uploaded(
    site: Site, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert site.tier is not None
    remote.is_open = False
    site.put("one", b"old")
    eventually(lambda: remote.waiting)

    def full(name: str, data: Buffer) -> None:
        raise NoSpaceError("full")

    monkeypatch.setattr(site.tier, "put_pending", full)
    with pytest.raises(NoSpaceError):
        site.put("one", b"new")
    remote.is_open = True
    assert site.uploads.flush(20) == FlushReport(0, 0, None)
    assert remote.objects == {"one": b"old"}


def test_a_failure_that_may_pass_is_tried_again_after_a_pause(site: Site, remote: Remote) -> None:
    remote.errors["one"] = [TransientError("reset")]
    site.put("one")
    eventually(lambda: site.steps("one")[-1:] == ["done"])
    assert site.steps("one") == ["queued", "started", "retried", "started", "done"]
    assert [str(each) for each in site.problems] == ["reset"]


def test_uploads_that_fail_together_pause_once(
    new_site: Callable[..., Site], remote: Remote
) -> None:
    """Eight failures of one outage are no reason to wait 64 times as long."""
    site = new_site(concurrency=8)
    remote.is_open = False
    for number in range(8):
        remote.errors[f"{number}"] = [TransientError("outage")]
        site.put(f"{number}")
    eventually(lambda: len(remote.waiting) == 8)
    remote.is_open = True
    eventually(lambda: len(site.problems) == 8)
    assert site.uploads.pause_s == 1.0
    eventually(lambda: len(remote.objects) == 8)


def test_a_flush_cuts_the_pause_short(site: Site, remote: Remote) -> None:
    site.uploads.pause_s = 30.0  # as after many failures
    remote.errors["one"] = [TransientError("reset")]
    site.put("one")
    eventually(lambda: site.problems)
    assert site.uploads.flush(20).complete


def test_at_exit_nobody_waits_for_the_end_of_a_pause(site: Site, remote: Remote) -> None:
    remote.errors["one"] = [TransientError("reset")] * 9
    site.put("one")
    started = time.monotonic()
    report = site.uploads.flush_while_it_works(60)
    assert time.monotonic() - started < 30
    assert (report.remaining, report.in_memory) == (1, 0)
    assert isinstance(report.error, TransientError)


def test_what_fails_for_good_is_set_apart_and_tried_again_by_a_flush(
    site: Site, remote: Remote
) -> None:
    remote.errors["bad"] = [AccessDeniedError("no")]
    site.put("bad")
    eventually(lambda: site.problems)
    site.put("good")
    eventually(lambda: "good" in remote.objects)
    assert site.steps("bad") == ["queued", "started", "failed"]
    eventually(lambda: site.uploads.pending == 1)
    assert site.uploads.flush(20) == FlushReport(0, 0, None)
    assert set(remote.objects) == {"bad", "good"}


def test_a_flush_says_what_remains_and_why(site: Site, remote: Remote) -> None:
    remote.errors["bad"] = [AccessDeniedError("no")] * 9
    site.put("bad")
    report = site.uploads.flush(20)
    assert (report.remaining, report.in_memory, report.complete) == (1, 0, False)
    assert isinstance(report.error, AccessDeniedError)


def test_a_flush_has_an_end(site: Site, remote: Remote) -> None:
    remote.is_open = False
    site.put("one")
    site.put("two")
    assert site.uploads.flush(0.01).remaining == 2
    remote.is_open = True
    assert site.uploads.flush(20).complete


def test_a_flush_has_an_end_even_where_every_thread_hangs(site: Site, remote: Remote) -> None:
    """As in lookups of a name server that is gone."""
    remote.is_open = False
    site.put("one")
    site.put("two")
    eventually(lambda: len(remote.waiting) == 2)
    goes_on = threading.Event()

    async def hang() -> None:
        for _ in range(100):
            asyncio.get_running_loop().run_in_executor(None, goes_on.wait)

    site.loop.wait(hang(), 20)
    try:
        assert in_thread(lambda: site.uploads.flush(0.01))().remaining == 2
    finally:
        goes_on.set()


def test_even_a_mistake_in_the_store_stops_no_other_upload(
    new_site: Callable[..., Site], remote: Remote
) -> None:
    site = new_site(concurrency=1)
    remote.errors = {"bad": [RuntimeError("bug")]}
    site.put("bad")
    site.put("good")
    eventually(lambda: "good" in remote.objects)
    assert site.uploads.flush(20).complete


def test_a_corrupt_object_is_set_aside_not_uploaded(site: Site, remote: Remote) -> None:
    assert site.tier is not None
    remote.errors["one"] = [CorruptError("section", "bit rot")]
    site.put("one")
    assert site.uploads.flush(20).remaining == 0
    assert remote.objects == {}
    assert site.tier.get("one") is None
    assert site.tier.pending() == []
    assert site.steps("one")[-1] == "failed"


def test_an_object_replaced_while_found_corrupt_is_not_set_aside(
    site: Site, remote: Remote
) -> None:
    assert site.tier is not None
    remote.is_open = False
    remote.errors["one"] = [CorruptError("section", "bit rot")]
    site.put("one", b"rotten")
    eventually(lambda: remote.waiting)
    site.put("one", b"fresh")
    remote.is_open = True
    assert site.uploads.flush(20).complete
    assert remote.objects == {"one": b"fresh"}
    assert site.tier.get("one") == b"fresh"


@pytest.mark.parametrize("method", ["quarantine", "uploaded", "peek", "pending", "objects"])
def test_uploads_go_on_when_the_tier_fails_for_a_while(
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


def test_an_object_that_is_gone_is_forgotten(site: Site, remote: Remote) -> None:
    assert site.tier is not None
    site.tier.put_pending("gone", b"data")
    site.tier.delete("gone")
    assert site.uploads.flush(20).complete
    assert site.steps("gone") == ["queued", "started", "absent"]
    assert remote.objects == {}


def test_records_made_before_there_was_a_queue_are_uploaded(site: Site, remote: Remote) -> None:
    assert site.tier is not None
    site.tier.put_pending("one", b"data")
    elsewhere = DiskTier(site.tier.root, namespace="other", max_bytes=MIB, max_files=10)
    elsewhere.put_pending("one", b"of another place")
    elsewhere.close()
    site.uploads.start()
    eventually(lambda: remote.objects == {"one": b"data"})


# -- without a tier


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


# -- ends, and what comes after


def test_closing_releases_a_flush_and_leaves_the_records(
    new_site: Callable[..., Site], remote: Remote
) -> None:
    site = new_site()
    remote.is_open = False
    site.put("one")
    eventually(lambda: remote.waiting)
    join = in_thread(lambda: site.uploads.flush(None))
    eventually(lambda: tasks_on(site.loop) == 4 + 1)  # workers and flush
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


_SAVER = """
from s3cache.tier import DiskTier
tier = DiskTier(sys.argv[1], namespace="ns", max_bytes=1 << 28, max_files=10_000)
for number in range(int(sys.argv[2])):
    tier.put_pending(f"{number}", b"data")
print("saved", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_uploaded_by_exactly_one(
    tmp_path: Path, new_site: Callable[..., Site], remote: Remote
) -> None:
    done = run_script(_SAVER, tmp_path / "tier", 40, check=False)
    assert (done.returncode, done.stdout) == (-9, "saved\n")
    sites = [new_site() for _ in range(4)]
    for site in sites:
        site.uploads.start()
    eventually(lambda: len(remote.objects) == 40)
    for site in sites:
        assert site.uploads.flush(20).complete
    assert remote.puts == {f"{number}": 1 for number in range(40)}


def test_closing_insists_where_a_cancellation_gets_lost() -> None:
    """As asyncio.wait_for loses it when it comes together with the result."""
    entered = threading.Event()
    lost: list[str] = []

    class Losing(Remote):
        async def publish(self, name: str, data: Buffer) -> None:
            try:
                entered.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(name)
            await asyncio.Event().wait()

    site = Site(None, Losing())
    site.uploads.put_in_memory("one", b"data")
    assert entered.wait(20)
    site.uploads.close()
    assert lost == ["one"]
    eventually(lambda: tasks_on(site.loop) == 0)
    site.close()
