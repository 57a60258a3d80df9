"""Processes that are killed: usage exact, objects whole, each pending upload adopted once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.tier import DiskTier
from tests.tier.processes import finish, heard, open_tier, stop, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., subprocess.Popen[str]]


@pytest.mark.parametrize("verb", ["put", "replace", "put_pending", "evict", "delete"])
def test_killed_before_any_system_call(start: Start, verb: str) -> None:
    """Usage is exact, objects are whole, and each pending upload is adopted once."""
    script = """
        from tests.support.moments import before_call

        verb, tier = sys.argv[2], None

        def die():
            os.kill(os.getpid(), signal.SIGKILL)

        def use():
            if verb in ("put", "replace", "evict"):
                name = "old/1" if verb == "replace" else "new/1"
                tier.put(name, body(name, b"new" * 1000))
            elif verb == "put_pending":
                tier.put_pending("new/1", body("new/1", b"new"))
            else:
                getattr(tier, verb)("old/1")

        for moment in itertools.count(1):
            shutil.rmtree(root, ignore_errors=True)
            tier = DiskTier(root, max_bytes=1 << 20, max_files=2 if verb == "evict" else 4)
            for name in ("old/1", "old/2"):
                tier.put(name, body(name, b"old"))
            child = os.fork()
            if child == 0:
                with before_call(moment, die):
                    use()
                os._exit(0)
            killed = os.waitpid(child, 0)[1] != 0
            tier = DiskTier(root, max_bytes=1 << 20, max_files=2 if verb == "evict" else 4)
            check_all(tier)
            # An upload without an object may be pending: it costs the adopter nothing.
            adopted = tier.adopt()
            if verb == "put_pending" and tier.holds("new/1"):
                assert adopted == ["new/1"]
            for left in Path(root, "staging").iterdir():
                os.utime(left, (0, 0))
            ObjectFiles(root).sweep()
            assert os.listdir(Path(root, "staging")) == []
            tier.close()
            if not killed:
                break
        assert moment > 5
        """
    finish(start(script, verb))


def test_killed_at_random_while_writing_at_the_bound(start: Start) -> None:
    script = """
        chance = random.Random(7)
        bounds = {"max_bytes": 100_000, "max_files": 40}
        DiskTier(root, **bounds).close()
        for kill in range(40):
            done, doing = os.pipe()
            child = os.fork()
            if child == 0:
                chance = random.Random(kill)
                tier = DiskTier(root, **bounds)
                while True:
                    name = f"{chance.randrange(9)}/{chance.randrange(9)}"
                    data = body(name, chance.randbytes(chance.randrange(9_000)))
                    verb = chance.choice([tier.put, tier.put, tier.put_pending])
                    verb(name, data)
                    tier.uploaded(name)
                    if chance.random() < 0.1:
                        tier.delete(name)
                    os.write(doing, b".")
            os.close(doing)
            # After so many writes, not after some time: a busy machine writes nothing in 40 ms.
            # 40 times 20 of 4,500 bytes are many times the bound.
            for _ in range(chance.randrange(40)):
                assert os.read(done, 1) == b".", "the writer has failed"
            time.sleep(chance.uniform(0, 0.003))
            os.kill(child, signal.SIGKILL)
            os.close(done)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
            tier = DiskTier(root, **bounds)
            check_all(tier)
            usage = tier.usage()
            assert usage.bytes <= 100_000 and usage.files <= 40
            for name in tier.adopt():
                tier.uploaded(name)
            tier.close()
        assert usage.files > 5, "nothing has stayed"  # of about 22 that fit
        """
    finish(start(script))


def test_pending_uploads_survive_their_process(start: Start, root: Path) -> None:
    owner = start(
        """
        bounds = {"max_bytes": 1 << 20, "max_files": 100}
        one = DiskTier(root, namespace="one", **bounds)
        two = DiskTier(root, namespace="two", **bounds)
        for tier, name in ((one, "a"), (one, "b"), (two, "a")):
            tier.put_pending(name, body(name, b"payload"))
        one.uploaded("b")
        say("done")
        hear()
        """
    )
    heard(owner)
    adopter, other = open_tier(root, "one"), open_tier(root, "two")
    assert adopter.adopt() == []  # as long as it lives
    stop(owner)
    assert adopter.adopt() == []  # also stopped
    owner.kill()
    owner.wait()
    assert adopter.adopt() == ["a"]
    assert other.adopt() == ["a"]
    assert adopter.pending() == other.pending() == ["a"]
    data = adopter.get("a")
    assert data is not None
    assert data.endswith(b"payload")
    other.close()
    adopter.close()


def test_each_pending_upload_is_adopted_by_exactly_one_of_many_processes(
    start: Start, root: Path
) -> None:
    owners = [
        start(
            """
            tier = DiskTier(root, max_bytes=1 << 20, max_files=1_000)
            for i in range(100):
                tier.put_pending(f"{sys.argv[2]}/{i}", b"x")
            say("done")
            hear()
            """,
            name,
        )
        for name in ("dead0", "dead1", "alive")
    ]
    for owner in owners:
        heard(owner)
    for owner in owners[:2]:
        owner.kill()
        owner.wait()
    adopters = [
        start(
            """
            tier = DiskTier(root, max_bytes=1 << 20, max_files=1_000)
            say("ready")
            hear()
            adopted = tier.adopt() + tier.adopt()
            assert sorted(adopted) == sorted(tier.pending())
            say(json.dumps(adopted))
            hear()  # alive until all have tried
            """
        )
        for _ in range(8)
    ]
    for adopter in adopters:
        heard(adopter)
    tell(*adopters)
    adopted = [name for adopter in adopters for name in json.loads(heard(adopter))]
    assert len(adopted) == 200
    assert set(adopted) == {f"dead{d}/{i}" for d in range(2) for i in range(100)}
    tell(*adopters, owners[2])
    finish(*adopters, owners[2])


def test_pending_is_not_evicted_while_it_changes_hands(start: Start, root: Path) -> None:
    """Evicting looks through all owners one by one: no record may pass it by."""
    tier = DiskTier(root, max_bytes=1 << 20, max_files=60)
    pinned = {f"pinned/{i}" for i in range(20)}
    for name in pinned:
        tier.put_pending(name, b"x")
    tier.close()
    handing_on = """
        say("ready")
        hear()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            tier = DiskTier(root, max_bytes=1 << 20, max_files=60)
            tier.adopt()
            tier.close()
        """
    evicting = """
        tier = DiskTier(root, max_bytes=1 << 20, max_files=60)
        say("ready")
        hear()
        until, i = time.monotonic() + 2, 0
        while time.monotonic() < until:
            for i in range(i, i + 100):
                tier.put(f"{os.getpid()}/{i}", b"x")
        """
    workers = [*(start(handing_on) for _ in range(3)), *(start(evicting) for _ in range(2))]
    for worker in workers:
        heard(worker)
    tell(*workers)
    finish(*workers)
    assert pinned <= {info.key for info in tier.objects()}
    adopter = DiskTier(root, max_bytes=1 << 20, max_files=60)
    assert set(adopter.adopt()) == pinned
    adopter.close()
