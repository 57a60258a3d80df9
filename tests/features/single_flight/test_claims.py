"""Claims: one process compiles, the others wait for it, and none waits forever."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from s3cache.features.single_flight.claims import Claims, WaitOutcome
from s3cache.tier import DiskTier
from tests.support.stopped import descriptors, open_tier, read_line
from tests.support.waiting import LONG_S

Start = Callable[..., subprocess.Popen[str]]
Another = Callable[[], Claims]

# A process that claims a key, and then forks a child that stays.
HOLDER = """
    from s3cache.features.single_flight.claims import Claims

    waited = Claims(DiskTier(root, max_bytes=1 << 20, max_files=100)).take("key", 60)
    assert waited.claim is not None and not waited.holder
    say(os.fork() or signal.pause())
    hear()
"""


@pytest.fixture
def another(root: Path) -> Iterator[Another]:
    """Return a function that makes claims with their own locks, as of another process."""
    tiers: list[DiskTier] = []

    def make() -> Claims:
        tiers.append(open_tier(root))
        return Claims(tiers[-1])

    yield make
    for tier in tiers:
        tier.close()


def waiting(pool: ThreadPoolExecutor, claims: Claims) -> Future[WaitOutcome]:
    return pool.submit(claims.take, "key", LONG_S)


def claimed(claims: Claims, key: str = "key") -> WaitOutcome:
    waited = claims.take(key, LONG_S)
    assert waited.claim is not None
    return waited


def end(waited: WaitOutcome, *, published: bool) -> None:
    assert waited.claim is not None
    waited.claim.release(published=published)


def test_others_wait_until_an_entry_is_published(another: Another, root: Path) -> None:
    """Each gets the claim in turn, to look for the entry. No file and no lock is left."""
    first = claimed(another())
    assert first == WaitOutcome(first.claim)
    with ThreadPoolExecutor() as pool:
        others = [waiting(pool, another()) for _ in range(5)]
        time.sleep(0.2)
        assert not any(each.done() for each in others)
        end(first, published=True)
        for other in others:
            other.add_done_callback(lambda done: end(done.result(), published=True))
        ended = [other.result() for other in others]
    assert all(each.seconds >= 0.1 and not each.timed_out for each in ended)
    assert {each.holder.partition("@")[0] for each in ended} == {str(os.getpid())}
    assert os.listdir(root / "claims") == []
    assert descriptors(root / "claims") <= 6  # directories alone


def test_others_continue_together_if_nothing_landed(another: Another) -> None:
    """They compile side by side, as without claims. A later process gets the claim."""
    first = claimed(another())
    with ThreadPoolExecutor() as pool:
        others = [waiting(pool, another()) for _ in range(5)]
        time.sleep(0.2)
        end(first, published=False)
        ended = [other.result() for other in others]
    assert all(each.claim is None and not each.timed_out for each in ended)
    later = claimed(another())
    assert not later.holder


def test_a_wait_ends_at_the_bound_and_is_not_repeated_for_the_same_holder(another: Another) -> None:
    holder, other = another(), another()
    first, second = claimed(holder), claimed(holder, "another key")
    waited = other.take("key", 0.3)
    assert waited.timed_out
    assert 0.3 <= waited.seconds < LONG_S
    assert waited.holder.partition("@")[0] == str(os.getpid())
    again = other.take("another key", LONG_S)
    assert again.timed_out
    assert again.seconds < LONG_S / 2
    assert not claimed(other, "a third key").holder, "each key has its own claim"
    for each in (first, second):
        end(each, published=True)
    assert other.take("another key", LONG_S).claim is not None


def test_another_process_gets_the_claim_of_a_killed_holder_at_once(
    start: Start, another: Another
) -> None:
    """This holds even if the holder has forked a child that is still alive."""
    holder = start(HOLDER)
    child = int(read_line(holder))
    try:
        with ThreadPoolExecutor() as pool:
            other = waiting(pool, another())
            time.sleep(0.2)
            assert not other.done()
            holder.kill()
            waited = other.result(LONG_S)
        assert waited.claim is not None
        assert waited.holder.startswith(f"{holder.pid}@")
        os.kill(child, 0)  # it is still alive
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_link_in_the_place_of_a_claim_is_not_followed(
    another: Another, root: Path, tmp_path: Path
) -> None:
    """Writes through an attacker's link would change its target."""
    first = another()
    claim = claimed(first)
    (name,) = os.listdir(root / "claims")
    assert claim.claim is not None
    claim.claim.release(published=True)
    target = tmp_path / "target"
    target.write_text("precious")
    (root / "claims" / name).symlink_to(target)
    assert claimed(another()).claim is not None
    assert target.read_text() == "precious"
