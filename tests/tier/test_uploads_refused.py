"""Uploads that are refused are tried again; what others have left is left to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from s3cache.errors import AccessDeniedError, ConfigError, NoSpaceError, UntrustedError
from s3cache.tier import DiskTier
from tests.support.scripts import run_script
from tests.support.waiting import eventually
from tests.tier.sites import MIB, Remote, Site

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from s3cache.store import Buffer


class Guarded(Remote):
    """A remote that refuses writes while it is ``closed_to_us``."""

    def __init__(self) -> None:
        super().__init__()
        self.closed_to_us = True
        self.untrusted: Callable[[str], bool] = lambda _: False
        self.tried: list[str] = []
        self.error: Exception = AccessDeniedError("expired")

    async def publish(self, name: str, data: Buffer, note: bytes | None = None) -> bool:
        self.tried.append(name)
        if self.untrusted(name):
            raise UntrustedError("unsigned", "nobody signed it")
        if self.closed_to_us:
            raise self.error
        return await super().publish(name, data, note)


@pytest.fixture
def remote() -> Guarded:
    return Guarded()


_SAVER = """
from s3cache.tier import DiskTier
tier = DiskTier(sys.argv[1], namespace="ns", max_bytes=1 << 28, max_files=10_000)
for number in range(int(sys.argv[2])):
    tier.put_pending(f"{number}", b"data")
os.kill(os.getpid(), signal.SIGKILL)
"""


def left_behind(tmp_path: Path, count: int) -> None:
    """A process saves so many objects and is killed."""
    assert run_script(_SAVER, tmp_path / "tier", count, check=False).returncode == -9


def free(tmp_path: Path) -> list[str]:
    """What a process with rights of its own would find to adopt now."""
    tier = DiskTier(tmp_path / "tier", namespace="ns", max_bytes=256 * MIB, max_files=10_000)
    names = tier.adopt()
    tier.close()
    return names


def test_what_others_left_and_is_not_trusted_is_left_to_them_at_once(
    tmp_path: Path, site: Site, remote: Guarded
) -> None:
    """Each is looked at once, and none keeps those behind it waiting, nor is it our failure."""
    remote.closed_to_us = False
    remote.untrusted = lambda name: len(name) > 1
    left_behind(tmp_path, 40)
    report = site.uploads.flush(60)
    assert (report.complete, report.error) == (True, None)
    assert sorted(remote.objects) == [f"{number}" for number in range(10)]
    assert sorted(remote.tried) == sorted(f"{number}" for number in range(40))
    assert not site.problems
    assert len(free(tmp_path)) == 30


@pytest.mark.parametrize("error", [AccessDeniedError("expired"), NoSpaceError("quota")], ids=str)
def test_what_was_refused_is_tried_again_by_itself(
    site: Site, remote: Guarded, error: Exception
) -> None:
    """Without a flush, once the clock, the token or the bucket is right again."""
    remote.error = error
    for number in range(40):
        site.put(f"{number}")
    eventually(lambda: len(site.problems) >= 40)
    remote.closed_to_us = False
    eventually(lambda: len(remote.objects) == 40)
    eventually(lambda: site.uploads.pending == 0)
    assert site.uploads.retry_s == 0.0


def test_it_is_tried_again_less_and_less_often_and_not_all_at_once(
    new_site: Callable[..., Site], remote: Guarded
) -> None:
    site = new_site(concurrency=2)
    for number in range(20):
        site.put(f"{number}")
    eventually(lambda: len(site.problems) >= 20)
    assert site.uploads.retry_s >= 2.0
    eventually(lambda: len(site.problems) >= 22)
    eventually(lambda: site.uploads.retry_s >= 4.0)
    assert set(remote.tried[20:22]) == set(remote.tried[:2])


def test_it_is_tried_once_more_at_the_exit(site: Site, remote: Guarded) -> None:
    """A pod's disk goes with it: this is the last chance."""
    site.uploads.retry_s = 200.0  # as after many refusals
    for number in range(40):
        site.put(f"{number}")
    eventually(lambda: len(site.problems) >= 40)
    remote.closed_to_us = False
    assert site.uploads.flush_while_it_works(20).complete
    assert len(remote.objects) == 40


def test_an_exit_that_is_refused_ends(site: Site, remote: Guarded) -> None:
    for number in range(40):
        site.put(f"{number}")
    eventually(lambda: len(site.problems) >= 40)
    report = site.uploads.flush_while_it_works(20)
    assert report.remaining == 40
    assert len(remote.tried) < 80  # a few tell


# --- records of others


def test_a_process_without_the_right_to_write_leaves_the_uploads_of_others(
    tmp_path: Path, new_site: Callable[..., Site], remote: Guarded
) -> None:
    left_behind(tmp_path, 30)
    site = new_site()
    site.uploads.start()
    eventually(lambda: site.problems)
    eventually(lambda: site.uploads.pending == 0)
    assert site.tier is not None
    assert site.tier.pending() == []
    assert len(remote.tried) == 1  # which tells
    assert sorted(free(tmp_path)) == sorted(f"{number}" for number in range(30))


def test_what_was_adopted_is_given_back_when_the_right_to_write_ends(
    tmp_path: Path, new_site: Callable[..., Site], remote: Guarded
) -> None:
    remote.closed_to_us, remote.is_open = False, False
    left_behind(tmp_path, 30)
    site = new_site()
    site.put("own")
    eventually(lambda: remote.waiting)
    site.uploads.start()
    remote.errors.update({f"{number}": [AccessDeniedError("no more")] for number in range(30)})
    remote.is_open = True
    eventually(lambda: "own" in remote.objects)
    eventually(lambda: site.uploads.pending == 0)
    eventually(lambda: len(free(tmp_path)) == 30)


def test_what_is_there_already_proves_nothing(
    tmp_path: Path, new_site: Callable[..., Site], remote: Guarded
) -> None:
    """Nothing was written for it; more are taken all the same, as long as none is refused."""

    class Full(Guarded):
        async def publish(self, name: str, data: Buffer, note: bytes | None = None) -> bool:
            await super().publish(name, data, note)
            return False

    full = Full()
    full.closed_to_us = False
    left_behind(tmp_path, 30)
    tier = DiskTier(tmp_path / "tier", namespace="ns", max_bytes=256 * MIB, max_files=10_000)
    site = Site(tier, full)
    try:
        site.uploads.start()
        eventually(lambda: len(full.objects) == 30)
        eventually(lambda: tier.pending() == [])
    finally:
        site.close()


def test_an_object_of_others_that_cannot_be_uploaded_here_holds_up_no_other(
    tmp_path: Path, new_site: Callable[..., Site], remote: Guarded
) -> None:
    """As one that needs a key which this process does not have."""
    remote.closed_to_us = False
    left_behind(tmp_path, 5)
    remote.errors["3"] = [ConfigError("key", "is not here", "give it")] * 9
    site = new_site()
    site.put("own")
    eventually(lambda: "own" in remote.objects)
    assert site.uploads.flush(20).complete
    assert len(remote.objects) == 5
    assert free(tmp_path) == ["3"]


def test_what_was_adopted_and_is_saved_again_stays_ours(
    tmp_path: Path, new_site: Callable[..., Site], remote: Guarded
) -> None:
    left_behind(tmp_path, 1)
    site = new_site()
    site.put("0", b"fresh")
    assert site.uploads.flush(20).remaining == 1
    assert site.tier is not None
    assert site.tier.pending() == ["0"]
    remote.closed_to_us = False
    assert site.uploads.flush(20).complete
    assert remote.objects == {"0": b"fresh"}
