"""The local directory and tier with many processes, which are stopped, forked and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from s3cache.errors import TransientError
from s3cache.stats import Usage
from s3cache.tier import DiskTier
from s3cache.tier import _disk as module
from tests.support.marks import cases, slow
from tests.support.stopped import descriptors, finish, open_tier, read_line, send_line, stop
from tests.tier.sites import use

Start = Callable[..., subprocess.Popen[str]]


def test_a_forked_child_does_not_inherit_its_parents_locks(start: Start, root: Path) -> None:
    """A worker that outlives its parent must not keep other processes waiting."""
    parent = start(
        """
        tier = DiskTier(root, max_bytes=1 << 20, max_files=100)
        tier.put_pending("a", b"x")
        with locked():
            if os.fork() == 0:
                say(os.getpid())
            signal.pause()
        """
    )
    child = int(read_line(parent))
    try:
        parent.kill()
        parent.wait()
        other = open_tier(root)
        assert other.adopt() == ["a"]
        other.put("b", b"x")
        assert other.usage() == Usage(2, 2)
        other.close()
        os.kill(child, 0)  # it is still alive
    finally:
        os.kill(child, signal.SIGKILL)


def test_forking_while_other_threads_write(start: Start) -> None:
    """No child hangs, keeps a lock, or takes its parent's records."""
    script = """
        import threading, warnings

        warnings.simplefilter("ignore", DeprecationWarning)
        tier = DiskTier(root, max_bytes=1 << 20, max_files=100)
        writing = True

        def write(thread):
            for i in itertools.count():
                if not writing:
                    return
                tier.put_pending(f"{thread}/{i % 5}", b"x")

        threads = [threading.Thread(target=write, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        children = []
        for i in range(20):
            child = os.fork()
            if child == 0:
                tier.put_pending(f"child/{i}", b"x")
                assert tier.pending() == [f"child/{i}"]
                os._exit(0)
            children.append(child)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        writing = False
        for thread in threads:
            thread.join()
        assert sorted(tier.adopt()) == sorted(f"child/{i}" for i in range(20))
        assert tier.usage() == on_disk()
        """
    finish(start(script))


def test_calls_give_up_waiting_for_a_stopped_holder_of_the_lock(
    start: Start, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers do not wait for it, and no descriptor is left open."""
    tier = open_tier(root)
    tier.put_pending("old/1", b"x")
    holder = start(
        """
        tier = DiskTier(root, max_bytes=1 << 20, max_files=100)
        with locked():
            say("locked")
            hear()
        """
    )
    read_line(holder)
    stop(holder)
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.05)
    verbs = ("put", "put_pending", "delete", "usage", "adopt")
    held = []
    for _ in range(2):
        for verb in verbs:
            with pytest.raises(TransientError, match="another process"):
                use(tier, verb)
        held.append(descriptors(root))
    assert tier.get("old/1") == b"x"
    assert tier.pending() == ["old/1"]
    assert os.listdir(root / "staging") == []
    assert held[0] == held[1] == descriptors(root)
    holder.send_signal(signal.SIGCONT)
    send_line(holder)
    finish(holder)
    for verb in verbs:
        use(tier, verb)
    tier.close()


MAX_BYTES, MAX_FILES = 200_000, 50
HAMMER = f"""
    bounds = {{"max_bytes": {MAX_BYTES}, "max_files": {MAX_FILES}}}
    chance = random.Random(int(sys.argv[2]))
    stop = Path(root).with_name("stop")
    tier = DiskTier(root, **bounds)
    say("ready")
    hear()
    done = 0
    while done <= 100 or not stop.exists():
        name = f"{{chance.randrange(8)}}/{{chance.randrange(12)}}"
        size = chance.choice([0, 100, 3_000, 20_000])
        verb = chance.random()
        try:
            if verb < 0.4:
                data = tier.get(name)
                if data is not None:
                    check_whole(name, data)
            elif verb < 0.7:
                tier.put(name, body(name, chance.randbytes(size)))
            elif verb < 0.8:
                tier.put_pending(name, body(name, chance.randbytes(size)))
                if chance.random() < 0.9:
                    for mine in tier.pending():
                        tier.forget_uploaded({{mine: None}})
            elif verb < 0.85:
                tier.delete(name)
            elif verb < 0.94:
                tier.adopt()
            elif verb < 0.97:
                usage = tier.usage()
                assert 0 <= usage.bytes <= {MAX_BYTES} and 0 <= usage.files <= {MAX_FILES}
            else:
                tier.close()
                tier = DiskTier(root, **bounds)
        except NoSpaceError:
            for mine in tier.pending():
                tier.forget_uploaded({{mine: None}})
        done += 1
    tier.close()
"""


@pytest.mark.parametrize(("kills", "others"), [(1, 2), pytest.param(8, 4, marks=slow)])
def test_many_processes_at_once(start: Start, root: Path, kills: int, others: int) -> None:
    """One is killed and restarted repeatedly: nothing is corrupt, nothing fails, usage is exact."""
    tier = DiskTier(root, max_bytes=MAX_BYTES, max_files=MAX_FILES)
    workers = [start(HAMMER, seed) for seed in range(others)]
    for worker in workers:
        read_line(worker)
    send_line(*workers)
    for kill in range(kills):
        mortal = start(HAMMER, 100 + kill)
        read_line(mortal)
        send_line(mortal)
        for _ in range(8):
            usage = tier.usage()
            assert (usage.bytes <= MAX_BYTES, usage.files <= MAX_FILES) == (True, True)
            time.sleep(0.02)
        mortal.kill()
        assert mortal.wait() == -signal.SIGKILL, mortal.communicate()[1]
    (root.parent / "stop").touch()
    finish(*workers)
    finish(start("check_all(DiskTier(root, max_bytes=1 << 20, max_files=1_000))"))
    tier.close()


VERBS = "put_pending", "put", "replace", "evict", "delete"


@pytest.mark.parametrize("verb", cases(VERBS, slow_ones=VERBS[1:]))
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
            # An upload without an object may be pending: it does the adopter no harm.
            adopted = tier.adopt()
            if verb == "put_pending" and tier.head("new/1"):
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
