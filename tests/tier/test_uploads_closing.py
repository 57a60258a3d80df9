"""The end of uploads, and who takes up what is left."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import ClosedError
from tests.support.scripts import run_script
from tests.support.waiting import LONG_S, eventually, in_thread, tasks_on
from tests.tier.sites import Remote, Site

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from s3cache.store import Buffer


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
