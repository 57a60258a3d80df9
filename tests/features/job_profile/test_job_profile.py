"""Job profiles: the next machine that runs a program prefetches its entries at once."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from s3cache import entries, frame
from s3cache.cache import Engine, Hit
from s3cache.errors import AccessDeniedError, CorruptError, TransientError
from s3cache.features.job_profile import KEYS, JobProfileOptions
from s3cache.features.job_profile.profile import JobProfile, lookups_of
from s3cache.features.job_profile.program import program_key
from s3cache.frame import Frame
from s3cache.store import AcceptSize, FileStore, MemoryStore, NotAccepted, Store, WrapperStore
from s3cache.tier import Budget, background
from s3cache.trust import generate
from tests.support.caching import entry, open_engine
from tests.support.scripts import PRELUDE, python, run_script
from tests.support.stores import names, put, remove
from tests.support.waiting import LONG_S, eventually, in_thread

GRAPHS = [f"{number:02}" * 32 for number in range(12)]
Open = Callable[..., Engine]


class Gated(WrapperStore):
    """A store that notes its calls, and delays a call while ``holds`` is true for its key.

    It answers 403 to other verbs than ``allowed``, and nothing while it ``is_down``.
    """

    def __init__(self, inner: Store, *allowed: str, is_down: bool = False) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []
        self.holds: Callable[[str], bool] = lambda _: False
        self.allowed, self.is_down = allowed, is_down

    async def _around(self, verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append((verb, key))
        if self.is_down:
            raise TransientError("no answer", op=verb)
        if self.allowed and verb not in self.allowed:
            raise AccessDeniedError("403", op=verb)
        while self.holds(key):
            await asyncio.sleep(0.002)
        return await call()

    def got(self, key: str = "") -> list[str]:
        return [name for verb, name in self.calls if verb == "get" and key in name]


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process appear to run a file, which a pytest worker does not."""
    monkeypatch.setattr(sys, "argv", [__file__])


@pytest.fixture
def store(memory: MemoryStore) -> Gated:
    return Gated(memory)


@pytest.fixture
def machine(tmp_path: Path, store: Gated) -> Iterator[Open]:
    opened: list[Engine] = []

    def start(name: str, at: Store = store, **changes: Any) -> Engine:
        engine = open_engine(tmp_path / name, at, **{"job_profiles": True, **changes})
        opened.append(engine)
        engine.start()
        return engine

    yield start
    store.holds = lambda _: False
    for engine in opened:
        engine.close(0)


def profiles(store: Store) -> list[str]:
    return [name for name in names(store) if KEYS in name]


def is_known(engine: Engine) -> bool:
    """Return whether a process has looked for the newest profile of its program."""
    return bool(engine.parts["job_profile"].is_known)


def run(engine: Engine, keys: list[str] = GRAPHS, **saved: str) -> list[str]:
    """Look up ``keys``, save those that miss, and close; return the tier or reason of each."""
    tiers = [looked_up(engine, key, **saved) for key in keys]
    eventually(lambda: not engine.settings.of(JobProfileOptions).job_profiles or is_known(engine))
    engine.close()
    return tiers


def looked_up(engine: Engine, key: str, **saved: str) -> str:
    found = engine.lookup(key, lambda it: it.header.variant == saved.get("variant", ""))
    if isinstance(found, Hit):
        return found.tier
    engine.save(key, entry(key, **saved))  # type: ignore[arg-type]
    return str(found.reason)


def fetched(engine: Engine) -> int:
    return engine.stats().downloaded


def test_the_next_machine_finds_every_entry_on_its_disk(machine: Open, store: Gated) -> None:
    """The profile costs one GET and one listing, each entry one GET; an equal run writes none.

    A profile is not counted as an uploaded entry.
    """
    first = machine("a")
    assert {*run(first)} == {"absent"}
    assert first.stats().uploaded == len(GRAPHS)
    (profile,) = profiles(store)
    store.calls.clear()
    second = machine("b")
    eventually(lambda: fetched(second) == len(GRAPHS))
    eventually(lambda: second.stats().local.files == len(GRAPHS))  # type: ignore[union-attr]
    assert {*run(second)} == {"local"}
    assert [verb for verb, _ in store.calls].count("list") == 1
    assert sorted(store.got()) == sorted([profile, *map(entries.first_name, GRAPHS)])
    assert profiles(store) == [profile]


def test_entries_are_fetched_even_if_the_first_names_of_their_keys_were_removed(
    machine: Open, store: Gated, memory: MemoryStore
) -> None:
    run(machine("a", job_profiles=False), variant="a")
    run(machine("b"), variant="b")
    for key in GRAPHS:
        remove(memory, entries.first_name(key))
    again = machine("c")
    eventually(lambda: fetched(again) == len(GRAPHS))
    assert {*run(again, variant="b")} == {"local"}


def test_a_lookup_does_not_wait_for_the_profile(machine: Open, store: Gated) -> None:
    run(machine("a"))
    store.holds = lambda name: KEYS in name
    second = machine("b")
    assert [looked_up(second, key) for key in GRAPHS] == ["remote"] * len(GRAPHS)


def test_the_variant_that_was_used_is_fetched_too(machine: Open) -> None:
    """Another variant has the first name; entries on the disk are not fetched again."""
    run(machine("a", job_profiles=False), variant="other")
    first = machine("b")
    run(first, variant="mine")
    second = machine("c")
    eventually(lambda: fetched(second) == 2 * len(GRAPHS))
    eventually(lambda: second.stats().local.files == 2 * len(GRAPHS))  # type: ignore[union-attr]
    assert {*run(second, variant="mine")} == {"local"}
    again = machine("b")
    assert {*run(again, variant="mine")} == {"local"}
    assert fetched(again) == 0


# Contents that an attacker may put in place of a profile's lookups.
HOSTILE: dict[str, bytes] = {
    "a path": msgpack.packb([["../../etc", ""]]),
    "a variant that is a path": msgpack.packb([[GRAPHS[0], "/x"]]),
    "no names": msgpack.packb([[1, None]]),
    "no pairs": msgpack.packb([GRAPHS[0]]),
    "names that no set can hold": msgpack.packb([[[], {}]]),
    "no list": msgpack.packb(7),
    "a million": msgpack.packb([[f"{number:x}", ""] for number in range(1_000_000)]),
    "more than the limit": msgpack.packb([[f"{number:x}", ""] for number in range(5_000)]),
    "a bomb": random.Random(0).randbytes(100_000) + bytes(80 << 20),
    "an array that claims to be long": b"\xdd\xff\xff\xff\xff",
    "deep arrays": b"\xdd\x00\x01\x00\x00" * 500,
    "nothing": b"",
    "more after the end": msgpack.packb([]) * 2,
}


def encoded(content: bytes, kind: str = "job", key: str = "ab" * 32, **more: bytes) -> bytes:
    return frame.encode(kind=kind, key=key, schema=1, sections={"lookups": content, **more})


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_lookups_are_refused(content: bytes) -> None:
    """They cause no unpickling and no large allocation."""
    with pytest.raises(CorruptError):
        lookups_of(frame.decode(encoded(content)))


@pytest.mark.parametrize("damage", ["garbage", "another entry", "another kind", "huge", "a path"])
def test_an_invalid_profile_is_ignored_with_one_warning(
    machine: Open, store: Gated, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """It causes no request; lookups still hit."""
    run(machine("a"))
    (profile,) = profiles(store)
    key, sound = entries.key_of(profile), msgpack.packb([[GRAPHS[0], ""]])
    data = {
        "garbage": b"garbage",
        "another entry": bytes(entry("ab" * 32).data),
        "another kind": encoded(sound, "test", key),
        "huge": encoded(sound, key=key, noise=random.Random(0).randbytes(2 << 20)),
        "a path": encoded(HOSTILE["a path"], key=key),
    }[damage]
    put(store, profile, data)
    store.calls.clear()
    second = machine("b")
    eventually(lambda: is_known(second))
    assert store.got() == [profile]
    assert fetched(second) == 0
    assert {*run(second)} == {"remote"}
    assert len([it for it in caplog.records if "a job profile is not used" in it.message]) == 1
    third = machine("c")
    eventually(lambda: fetched(third) == len(GRAPHS))


def followed(
    memory: MemoryStore, fetch: Callable[[JobProfile, str, AcceptSize], Any], max_bytes: int
) -> list[str]:
    """Follow a profile of GRAPHS, one fetch at a time; return the names that it requested."""
    requested, problems = list[str](), list[Exception]()
    job = JobProfile(
        reads=True, save=None, settled_s=0, max_bytes=max_bytes, on_problem=problems.append
    )
    profile = encoded(msgpack.packb([[key, ""] for key in GRAPHS]), key=str(program_key()))
    put(memory, entries.first_name(program_key()), profile)

    async def noted(name: str, accept: AcceptSize) -> Frame | NotAccepted | None:
        requested.append(name)
        found: Frame | NotAccepted | None = fetch(job, name, accept)
        return found

    remote: Any = SimpleNamespace(
        reader=memory,
        check_trust=None,
        join_calmly=noted,
        present=lambda _: [],
        budget=Budget(1 << 40),
        concurrency=1,
    )
    background().wait(job.follow(remote), LONG_S)
    assert problems == []
    return requested


@pytest.mark.parametrize(("max_bytes", "count"), [(1 << 40, 3), (800 << 20, 2)])
def test_the_total_size_of_fetched_entries_is_bounded(
    memory: MemoryStore, max_bytes: int, count: int
) -> None:
    """A profile fetches at most 1 GiB, and at most ``max_bytes``."""
    accepted = list[int]()

    def fetch(_: JobProfile, name: str, accept: AcceptSize) -> Frame | NotAccepted:
        size = 300 << 20
        if not accept(size):
            return NotAccepted(size)
        accepted.append(size)
        return entry(entries.key_of(name))

    assert len(followed(memory, fetch, max_bytes)) == len(GRAPHS)
    assert len(accepted) == count


@pytest.mark.parametrize("used", [["ff"], [*GRAPHS[-1:], "ff"]])
def test_a_profile_is_dropped_if_only_other_entries_are_used(
    memory: MemoryStore, used: list[str]
) -> None:
    """One used entry that it names is enough to keep following it."""

    def fetch(job: JobProfile, name: str, accept: AcceptSize) -> Frame | NotAccepted:
        for key in [*used, *(f"a{number}" for number in range(7))]:
            job.lookups[key, ""] = None
        return entry(entries.key_of(name)) if accept(1_000) else NotAccepted(1_000)

    requested = followed(memory, fetch, 1 << 40)
    assert len(requested) == (1 if len(used) == 1 else len(GRAPHS))


def test_no_prefetch_begins_while_a_lookup_waits(machine: Open, store: Gated) -> None:
    """A wrong profile does not slow a lookup down."""
    run(machine("a"))
    other = "ff" * 32
    run(machine("b", job_profiles=False), [other])
    store.calls.clear()
    store.holds = lambda name: KEYS in name or other in name
    second = machine("c")
    found = in_thread(lambda: second.lookup(other))
    eventually(lambda: store.got(other))
    store.holds = lambda name: other in name
    eventually(lambda: is_known(second))
    for _ in range(20):  # in this time they would begin
        assert not store.got(GRAPHS[0])
        time.sleep(0.005)
    store.holds = lambda _: False
    assert isinstance(found(), Hit)
    eventually(lambda: fetched(second) == 1 + len(GRAPHS))


def test_entries_that_an_unclosed_lookup_accepted_are_fetched(machine: Open) -> None:
    """Lookups of recalled frames may accept several entries."""
    run(machine("a", job_profiles=False), GRAPHS[:2])
    second = machine("b")
    for key in GRAPHS[:2]:
        lookup = second.candidates(key)
        for hit in lookup:
            lookup.accept(hit)
    eventually(lambda: is_known(second))
    second.close()
    third = machine("c")
    eventually(lambda: fetched(third) == 2)
    assert {*run(third, GRAPHS[:2])} == {"local"}


def test_only_a_trusted_profile_is_followed(
    machine: Open, store: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    """Other profiles are not parsed; an older one that is trusted is used."""
    ours, theirs = generate("ci"), generate("ci")
    trusting = {"trusted_keys": ours.public_text(), "signing_key": ours.secret_text()}
    run(machine("a", **trusting))
    (trusted,) = profiles(store)
    foreign = {"trusted_keys": theirs.public_text(), "signing_key": theirs.secret_text()}
    run(machine("b", **foreign), ["ff" * 32])
    assert len(profiles(store)) == 2
    second = machine("c", **trusting)
    eventually(lambda: fetched(second) == len(GRAPHS))
    assert trusted in store.got()
    assert not store.got("ff" * 32)[1:], "fetched only by the machine that saved it"
    assert len([it for it in caplog.records if "a job profile is not used" in it.message]) == 2


def test_a_stale_profile_costs_the_entries_it_names_and_is_replaced(
    machine: Open, store: Gated
) -> None:
    run(machine("a"))
    news = [f"a{number}" * 32 for number in range(3)]
    second = machine("b")
    eventually(lambda: fetched(second) == len(GRAPHS))
    run(second, news)
    store.calls.clear()
    third = machine("c")
    eventually(lambda: fetched(third) == len(news))
    assert {*run(third, news)} <= {"local", "remote"}
    assert len(store.got()) == 2 + len(news), "the first profile is fetched during the listing"


def test_configurations_that_alternate_soon_fetch_only_their_own_entries(
    machine: Open, store: Gated
) -> None:
    """The third run finds the profile of the first and saves it again; then nothing is wasted."""
    shared, ours, theirs = GRAPHS[:2], GRAPHS[2:7], GRAPHS[7:]
    for number, its in enumerate([ours, theirs, ours, theirs]):
        run(machine(f"first{number}"), [*shared, *its])
    count = len(profiles(store))
    for number, (its, others) in enumerate([(ours, theirs), (theirs, ours), (theirs, ours)]):
        store.calls.clear()
        engine = machine(f"later{number}")
        eventually(lambda engine=engine: fetched(engine) == len(shared))  # type: ignore[misc]
        assert {looked_up(engine, key) for key in [*shared, its[0]]} <= {"local", "remote"}
        expected = len([*shared, *its])
        eventually(lambda engine=engine, n=expected: fetched(engine) == n)  # type: ignore[misc]
        assert {*run(engine, its[1:])} == {"local"}
        assert not any(store.got(key) for key in others)
    assert len(profiles(store)) == count


def test_the_profile_of_another_configuration_is_left_for_a_better_one(
    machine: Open, store: Gated
) -> None:
    ours, theirs = GRAPHS[:6], GRAPHS[6:]
    run(machine("a"), ours)
    run(machine("b"), theirs)
    third = machine("c")
    eventually(lambda: fetched(third) == len(theirs))
    assert looked_up(third, ours[0]) == "remote"
    eventually(lambda: fetched(third) == len(GRAPHS))
    assert {*run(third, ours[1:])} == {"local"}


def test_a_run_that_uses_part_of_a_profile_keeps_it(machine: Open, store: Gated) -> None:
    """A job that ended early uses the beginning of its profile, for example."""
    run(machine("a"))
    run(machine("b"), GRAPHS[:8])
    assert len(profiles(store)) == 1
    run(machine("c"), GRAPHS[:3])
    assert len(profiles(store)) == 1
    run(machine("d"), GRAPHS[-3:])
    assert len(profiles(store)) == 2


class CreatesOnly(Gated):
    """A store that denies overwriting and deleting, as for job roles in infra/policies.py."""

    async def put(self, key: str, data: Any, *, mode: Any = "overwrite", **more: Any) -> None:
        if mode == "overwrite":
            raise AccessDeniedError("may not overwrite", op="put")
        await super().put(key, data, mode=mode, **more)


CREATES = "get", "get_range", "head", "list", "put", "atomic_create"


@pytest.mark.parametrize(("may_delete", "kept"), [(True, 9), (False, 12)])
def test_old_profiles_are_removed_if_the_job_may_delete(
    machine: Open, memory: MemoryStore, *, may_delete: bool, kept: int
) -> None:
    """The next process removes them; if it may not, no upload counts as failed."""
    store = memory if may_delete else CreatesOnly(memory, *CREATES)
    for number in range(12):
        engine = machine(f"m{number}", store)
        run(engine, [f"{number:02}" * 32])
        assert engine.stats().upload_failures == 0
    assert len(profiles(memory)) == kept


@pytest.mark.parametrize(
    "changes", [{"mode": "read-only"}, {"mode": "off"}, {"job_profiles": False}]
)
def test_no_profile_is_written_if_saves_or_profiles_are_off(
    machine: Open, store: Gated, changes: dict[str, Any]
) -> None:
    run(machine("a", job_profiles=False))
    second = machine("b", **changes)
    for key in GRAPHS:
        second.lookup(key)
    second.flush()
    second.close()
    assert profiles(store) == []


def test_a_job_that_may_not_write_leaves_no_profile_and_no_warning(
    machine: Open, memory: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Later processes do not try to upload it again."""
    run(machine("a", job_profiles=False))
    reader = machine("b", Gated(memory, "get", "list"))
    assert {*run(reader)} == {"remote"}
    assert profiles(memory) == []
    assert not reader.stats().upload_failures
    assert caplog.records == []
    may_only = machine("c", Gated(memory, "get", "list"))
    may_only.save(GRAPHS[0], entry(GRAPHS[0]))
    eventually(lambda: is_known(may_only))
    assert isinstance(may_only.flush(20).error, AccessDeniedError), (
        "the error of the graph's upload"
    )
    again = machine("b", Gated(memory, "get", "list"), job_profiles=False)
    assert again.flush().remaining == 0


def test_a_job_that_may_not_list_follows_the_first_profile(
    machine: Open, memory: MemoryStore
) -> None:
    run(machine("a"))
    reader = machine("b", Gated(memory, "get"))
    eventually(lambda: fetched(reader) == len(GRAPHS))


@pytest.mark.parametrize(("breaker_failures", "strict"), [(1, False), (1_000, True)])
def test_a_profile_is_uploaded_later_if_the_network_is_down(
    machine: Open,
    memory: MemoryStore,
    caplog: pytest.LogCaptureFixture,
    *,
    breaker_failures: int,
    strict: bool,
) -> None:
    """The offline process logs no warning of profiles; a later one uploads what it saved."""
    store = Gated(memory, is_down=True)
    changes = {"breaker_failures": breaker_failures, "strict": strict}
    offline = machine("a", store, exit_timeout_s=0.1, **changes)
    eventually(lambda: is_known(offline))
    assert strict or looked_up(offline, GRAPHS[0]) == "unavailable"
    for key in GRAPHS:
        offline.save(key, entry(key))
    offline.close()
    assert names(memory) == []
    assert not [each for each in caplog.records if "job profile" in each.message]
    store.is_down = False
    with machine("a", memory) as later:
        eventually(lambda: later.flush(1).complete)
    assert len(names(memory)) == len(GRAPHS) + 1
    assert len(profiles(memory)) == 1


_KILLED = """
import sys, time
from s3cache.cache import open_for_torch
from s3cache.features.job_profile import profile
from tests.support.caching import entry
profile.SETTLED_S = 0.05
engine = open_for_torch(sys.argv[1], {"local_dir": sys.argv[2]}).engine
for key in sys.argv[3:]:
    engine.save(key, entry(key))
print("saved", flush=True)
time.sleep(600)
"""


def test_a_killed_process_has_left_its_profile(tmp_path: Path) -> None:
    """A process writes its profile once lookups have ceased for a while."""
    remote, script = tmp_path / "remote", tmp_path / "train.py"
    script.write_text(_KILLED)
    url = f"file://{remote}?create=1"
    command = [sys.executable, str(script), url, str(tmp_path / "local"), *GRAPHS]
    root = Path(__file__).parents[3]
    process = subprocess.Popen(command, cwd=root, env={"PYTHONPATH": str(root), "HOME": "/"})
    try:
        eventually(lambda: remote.exists() and profiles(FileStore(remote)))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


_PROGRAM = """
import os, sys
from multiprocessing import get_context
from s3cache.features.job_profile.program import program_key
def show(*_): print(program_key() or "none", flush=True)
if __name__ == "__main__":
    show()
    if "--children" in sys.argv:
        for method in ("spawn", "fork"):
            child = get_context(method).Process(target=show)
            child.start()
            child.join()
        if not (child := os.fork()):
            show()
            os._exit(0)
        os.waitpid(child, 0)
"""


def test_a_profile_belongs_to_a_program_its_argument_names_and_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument values and the directory do not matter."""
    script, other = tmp_path / "train.py", tmp_path / "deep" / "train.py"
    other.parent.mkdir()

    def key(*arguments: str, path: Path = script, text: str = "1", rank: str = "") -> str:
        path.write_text(text)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
        monkeypatch.setattr(sys, "argv", [path.name, *arguments])
        monkeypatch.setenv("RANK", rank)
        return program_key()

    usual = key("--lr=1", "--seed", "2", "model=small")
    assert key("model=big", "--seed", "3", "--lr=-7") == usual
    assert key(*"xyz", "--lr=1", "--seed", "model=", path=other) == usual
    assert key("--lr", "--seed", "model=", path=other, text="changed") != usual
    assert key("big") == key(), "a value is not a name"
    assert len({usual, key(), key(rank="0"), key(rank="1"), key("--wide")}) == 5


def test_children_have_profiles_of_their_own(tmp_path: Path) -> None:
    """They have the same ones in the next run. ``python -c`` has none."""
    root = Path(__file__).parents[3]
    (tmp_path / "train.py").write_text(_PROGRAM)

    def keys(*arguments: str) -> list[str]:
        where = {"PYTHONPATH": f"{root}:{tmp_path}", "HOME": "/"}
        done = python("-W", "ignore", *arguments, cwd=tmp_path, env=where)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    families = keys("train.py", "--children"), keys("-m", "train", "--children")
    assert families[0] == families[1]
    assert len({*families[0]}) == 4, "the program and three kinds of children"
    job = "from s3cache.features.job_profile.program import program_key as k; print(k() or 'none')"
    assert keys("-c", job) == ["none"]


def test_the_module_of_profiles_is_not_imported_if_they_are_off(tmp_path: Path) -> None:
    done = run_script(
        """
        for is_on in (False, True):
            with open_engine(None, MemoryStore(), job_profiles=is_on) as engine:
                engine.start()
                engine.save(KEY, entry())
                engine.flush()
            print("s3cache.features.job_profile.profile" in sys.modules)
        """
    )
    assert done.stdout.split() == ["False", "True"]


def test_a_forked_child_has_a_profile_of_its_own(tmp_path: Path) -> None:
    """It neither follows nor replaces the profile of its parent."""
    remote, script = tmp_path / "remote", tmp_path / "train.py"
    script.write_text(PRELUDE + _FORKS)
    root = Path(__file__).parents[3]
    for number in range(2):
        where = {"PYTHONPATH": str(root), "HOME": "/"}
        places = [str(remote), str(tmp_path / f"local{number}")]
        done = python("-W", "ignore", str(script), *places, env=where)
        assert (done.returncode, done.stderr) == (0, "")
        assert {entries.key_of(name) for name in profiles(FileStore(remote))} == {
            *done.stdout.split()
        }
        assert len(profiles(FileStore(remote))) == 2


_FORKS = """
from pathlib import Path
from s3cache.features.job_profile.program import program_key
remote, local = map(Path, sys.argv[1:])

def run(key):
    for each in (key, "shared"):
        if isinstance(engine.lookup(each), Miss): engine.save(each, entry(each))
    eventually(lambda: engine.parts["job_profile"].is_known)
    print(program_key(), flush=True)
    assert engine.flush(20).complete
    engine.close()

engine = open_engine(local, FileStore(remote), job_profiles=True)
if not (child := os.fork()):
    run("child")
    os._exit(0)
assert join(child) == 0
run("parent")
"""
