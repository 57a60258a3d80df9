"""Uploads that fail: tried again, set apart or reported; the others go on."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import AccessDeniedError, CorruptError, TransientError
from s3cache.tier import FlushReport
from tests.support.scripts import run_script
from tests.support.waiting import LONG_S, eventually, in_thread
from tests.tier.sites import Remote, Site

if TYPE_CHECKING:
    from collections.abc import Callable


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


def test_the_exit_does_not_wait_for_the_end_of_a_pause(site: Site, remote: Remote) -> None:
    remote.errors["one"] = [TransientError("reset")] * 9
    site.put("one")
    started = time.monotonic()
    report = site.uploads.flush_while_it_works(2 * LONG_S)
    assert time.monotonic() - started < LONG_S
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


@pytest.mark.parametrize("method", ["quarantine", "uploaded", "pending_object", "pending", "adopt"])
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
    (Path(site.tier.root) / "objects" / "ns+" / "gone").unlink()
    assert site.uploads.flush(20).complete
    assert site.tier.pending() == []
    assert site.steps("gone") == ["queued", "started", "absent"]
    assert remote.objects == {}


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


def test_a_flush_that_gets_no_thread_says_what_remains(tmp_path: Path) -> None:
    """And uploads go on as soon as there is one."""
    said = run_script(_NO_THREADS, tmp_path).stdout.splitlines()
    assert said[:3] == ["Saved"] * 3
    assert said[3].startswith("3 False ")
    assert "can't start new thread" in said[3]
    assert said[4:] == ["True", "local"]


def test_a_flush_whose_thread_gets_no_workers_says_what_remains(tmp_path: Path) -> None:
    """There is a loop, but nothing that reads files for it."""
    code = """
    import concurrent.futures
    submit = concurrent.futures.ThreadPoolExecutor.submit
    def refuse(*_, **more):
        raise RuntimeError("can't start new thread")
    concurrent.futures.ThreadPoolExecutor.submit = refuse
    cache = open_cache(sys.argv[1], MemoryStore("place"))
    print(type(cache.save("key", entry("key", payload=bytes(10 << 20)))).__name__)
    report = cache.flush(5)
    print(report.remaining)
    concurrent.futures.ThreadPoolExecutor.submit = submit
    print(cache.flush(20).complete)
    cache.close(0)
    """
    assert run_script(code, tmp_path).stdout.splitlines() == ["Saved", "1", "True"]
