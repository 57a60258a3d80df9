"""The local directory and tier with real processes: many at once, stopped, forked and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import TransientError
from s3cache.stats import Usage
from s3cache.store import ObjectFiles
from s3cache.tier import DiskTier
from s3cache.tier import _bounds as module
from s3cache.tier._bounds import Accounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).parents[2]

# What every script begins with. A body tells its own name and digest.
PRELUDE = """
import hashlib, itertools, json, os, random, shutil, signal, sys, time
from pathlib import Path

from s3cache.errors import *
from s3cache.store import ObjectFiles
from s3cache.stats import Usage
from s3cache.tier import DiskTier
from s3cache.tier._bounds import Accounts

root = sys.argv[1]


def body(name, payload):
    content = name.encode() + b"\\0" + payload
    return hashlib.sha256(content).digest() + content


def check_whole(name, data):
    assert hashlib.sha256(data[32:]).digest() == data[:32], f"{name} is corrupt"
    assert data[32:].startswith(name.encode() + b"\\0"), f"{name} is another object"


def on_disk():
    sizes = [path.stat().st_size for path in Path(root, "objects").rglob("*") if path.is_file()]
    return Usage(sum(sizes), len(sizes))


def check_all(tier):
    assert tier.usage() == on_disk(), (tier.usage(), on_disk())
    for info in list(tier.objects()):
        check_whole(info.key, tier.get(info.key))


def say(*words):
    print(*words, flush=True)


def hear():
    assert sys.stdin.readline(), "the test is gone"

"""

Start = "Callable[..., subprocess.Popen[str]]"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def start(root: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process with a script; it is killed in the end, whatever state it is in."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *args: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(root), *map(str, args)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return line.strip()


def tell(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr


def stop(process: subprocess.Popen[str]) -> None:
    """Stopped it is alive but does nothing, for as long as it takes."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def open_tier(root: Path, namespace: str = "") -> DiskTier:
    return DiskTier(root, namespace=namespace, max_bytes=1 << 30, max_files=1_000)


# --- killed


@pytest.mark.parametrize("verb", ["put", "replace", "put_pending", "evict", "delete", "quarantine"])
def test_killed_before_any_system_call(start: Start, verb: str) -> None:
    """Whichever is the last it makes: accounts exact, objects whole, records with an heir."""
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
            # A record without an object may be: it costs whoever adopts it nothing.
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


def test_records_survive_their_process(start: Start, root: Path) -> None:
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
    heir, other = open_tier(root, "one"), open_tier(root, "two")
    assert heir.adopt() == []  # as long as it lives
    stop(owner)
    assert heir.adopt() == []  # also stopped
    owner.kill()
    owner.wait()
    assert heir.adopt() == ["a"]
    assert other.adopt() == ["a"]
    assert heir.pending() == other.pending() == ["a"]
    data = heir.get("a")
    assert data is not None
    assert data.endswith(b"payload")
    other.close()
    heir.close()


def test_each_record_gets_exactly_one_of_many_heirs(start: Start, root: Path) -> None:
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
    heirs = [
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
    for heir in heirs:
        heard(heir)
    tell(*heirs)
    adopted = [name for heir in heirs for name in json.loads(heard(heir))]
    assert len(adopted) == 200
    assert set(adopted) == {f"dead{d}/{i}" for d in range(2) for i in range(100)}
    tell(*heirs, owners[2])
    finish(*heirs, owners[2])


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
    heir = DiskTier(root, max_bytes=1 << 20, max_files=60)
    assert set(heir.adopt()) == pinned
    heir.close()


# --- forked


def test_a_forked_child_does_not_inherit_its_parents_locks(start: Start, root: Path) -> None:
    """A worker that outlives its parent must not keep everybody else waiting."""
    parent = start(
        """
        tier = DiskTier(root, max_bytes=1 << 20, max_files=100)
        tier.put_pending("a", b"x")
        with Accounts(ObjectFiles(root)).locked():
            if os.fork() == 0:
                say(os.getpid())
            signal.pause()
        """
    )
    child = int(heard(parent))
    try:
        parent.kill()
        parent.wait()
        heir = open_tier(root)
        assert heir.adopt() == ["a"]
        heir.put("b", b"x")
        assert heir.usage() == Usage(2, 2)
        heir.close()
        os.kill(child, 0)  # it lives all the while
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_is_an_owner_of_its_own(start: Start) -> None:
    script = """
        tier = DiskTier(root, max_bytes=1 << 20, max_files=100)
        tier.put_pending("parent", b"x")
        child = os.fork()
        if child == 0:
            assert tier.pending() == []
            assert tier.adopt() == []
            tier.put_pending("child", b"x")
            tier.uploaded("parent")  # not its own to tell
            assert tier.pending() == ["child"]
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert tier.pending() == ["parent"]
        assert tier.adopt() == ["child"]
        """
    finish(start(script))


def test_forking_while_other_threads_write(start: Start) -> None:
    """No child gets stuck, keeps a lock, or takes its parent's records."""
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


# --- stopped


def test_a_stopped_writer_keeps_its_staged_file(start: Start, root: Path) -> None:
    """However old the file looks; it is swept once the writer is dead."""
    script = """
        directory = ObjectFiles(root)
        with directory.staged("key", b"x" * 1000, durable=False) as staged:
            say(staged)
            hear()
            directory.rename(staged, "key")
        """
    writers = [start(script), start(script)]
    staged = [heard(writer) for writer in writers]
    for writer, path in zip(writers, staged, strict=True):
        stop(writer)
        os.utime(path, (0, 0))
    directory = ObjectFiles(root)
    assert directory.sweep() == 0
    writers[0].send_signal(signal.SIGCONT)
    tell(writers[0])
    finish(writers[0])
    assert directory.read("key") == b"x" * 1000
    writers[1].kill()
    writers[1].wait()
    assert directory.sweep() == 1
    assert not os.path.exists(staged[1])


def test_a_stopped_holder_of_the_lock_is_not_waited_for_for_ever(
    start: Start, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(root)
    tier.put("a", b"x")
    holder = start(
        """
        tier = DiskTier(root, max_bytes=1 << 20, max_files=100)
        with Accounts(ObjectFiles(root)).locked():
            say("locked")
            hear()
        """
    )
    heard(holder)
    stop(holder)
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.05)
    for put in (tier.put, tier.put_pending):
        with pytest.raises(TransientError):
            put("b", b"x")
    assert tier.get("a") == b"x"
    assert tier.pending() == []
    holder.send_signal(signal.SIGCONT)
    tell(holder)
    finish(holder)
    tier.put("b", b"x")
    assert tier.usage() == Usage(2, 2)
    tier.close()


# --- many at once


def test_one_of_many_processes_creates(start: Start, root: Path) -> None:
    """... also where the directories have to be made first, by all of them at once."""
    script = """
        directory = ObjectFiles(root)
        say("ready")
        hear()
        for i in range(100):
            try:
                directory.create(f"race/{i}/deep/key", sys.argv[2].encode() * 1000)
                say(i)
            except PreconditionError:
                pass
        say("end")
        """
    racers = [start(script, racer) for racer in "abcd"]
    for racer in racers:
        heard(racer)
    tell(*racers)
    directory = ObjectFiles(root)
    won: dict[str, str] = {}
    for racer, name in zip(racers, "abcd", strict=True):
        while (line := heard(racer)) != "end":
            assert line not in won
            won[line] = name
    assert len(won) == 100
    for i, name in won.items():
        assert directory.read(f"race/{i}/deep/key") == name.encode() * 1000
    finish(*racers)


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
                        tier.uploaded(mine)
            elif verb < 0.85:
                tier.delete(name)
            elif verb < 0.88:
                tier.quarantine(name)
            elif verb < 0.91:
                tier.trim()
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
                tier.uploaded(mine)
        done += 1
    tier.close()
"""


def test_many_processes_at_once(start: Start, root: Path) -> None:
    """... of which one is killed and started again: nothing corrupt, no error, accounts exact.

    An observer sums the files themselves from time to time, while nobody may change them.
    """
    tier = DiskTier(root, max_bytes=MAX_BYTES, max_files=MAX_FILES)
    accounts = Accounts(ObjectFiles(root))
    workers = [start(HAMMER, seed) for seed in range(4)]
    mortal = start(HAMMER, 100)
    for worker in (*workers, mortal):
        heard(worker)
    tell(*workers, mortal)
    samples = kills = 0
    while kills < 10:
        with accounts.locked() as books:
            sizes = [path.stat().st_size for path in (root / "objects").glob("*/*")]
            assert books.usage == Usage(sum(sizes), len(sizes))
            assert books.bytes <= MAX_BYTES
            assert books.files <= MAX_FILES
        samples += 1
        time.sleep(0.02)
        if samples % 8 == 0:
            mortal.kill()
            assert mortal.wait() == -signal.SIGKILL, mortal.communicate()[1]
            kills += 1
            mortal = start(HAMMER, 100 + kills)
            heard(mortal)
            tell(mortal)
    mortal.kill()
    mortal.wait()
    (root.parent / "stop").touch()
    finish(*workers)
    finish(start("check_all(DiskTier(root, max_bytes=1 << 20, max_files=1_000))"))
    tier.close()


# --- limits of the system


def test_a_limit_on_file_sizes_is_no_space(start: Start) -> None:
    script = """
        import resource

        tier = DiskTier(root, max_bytes=1 << 20, max_files=100)
        tier.put("a", b"old")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for put in (tier.put, tier.put_pending):
            for name in ("a", "b"):
                try:
                    put(name, b"x" * 200_000)
                except NoSpaceError as exc:
                    assert isinstance(exc.__cause__, OSError)
                else:
                    raise AssertionError("it was written")
        assert tier.get("a") == b"old"
        assert tier.usage() == on_disk() == Usage(3, 1)
        assert tier.pending() == []
        assert os.listdir(Path(root, "staging")) == []
        """
    finish(start(script))
