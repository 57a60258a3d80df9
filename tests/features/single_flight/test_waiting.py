"""A process waits for an entry that another process or machine compiles, and finds it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from s3cache.cache import Engine, Hit, Miss, Retry
from s3cache.features.single_flight import WAITED, leases
from s3cache.features.single_flight.claims import Claim, Claims, WaitOutcome
from s3cache.features.single_flight.install import group_timeout_s
from s3cache.store import MemoryStore
from s3cache.tier import DiskTier
from tests.support.caching import entry, open_engine
from tests.support.stores import DenyingStore, names
from tests.support.waiting import LONG_S, eventually

KEY = "ab" * 32
Open = Callable[..., Engine]


@pytest.fixture
def opened(tmp_path: Path, memory: MemoryStore) -> Iterator[Open]:
    engines: list[Engine] = []

    def open_one(machine: str = "a", store: Any = memory, **options: Any) -> Engine:
        engines.append(open_engine(tmp_path / machine, store, **options))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close(0)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def claim_of(claimed: list[WaitOutcome | None]) -> Claim:
    """Return the claim that the first lookup took."""
    assert claimed[0] is not None
    assert claimed[0].claim is not None
    return claimed[0].claim


def counts(engine: Engine) -> Mapping[str, float]:
    return engine.stats().features["single_flight"]


def looked_up(
    engine: Engine, claimed: list[WaitOutcome | None], key: str = KEY, bound_s: float = LONG_S
) -> Hit | Miss:
    """Look a graph up as the hooks do, and append the claim to ``claimed``."""

    def claim() -> Retry | None:
        flight = engine.parts.get("single_flight")
        claimed.append(outcome := None if flight is None else flight.claim(key, bound_s))
        return None if outcome is None else outcome.retry()

    with engine.candidates(key, "fx", retry=claim) as lookup:
        for hit in lookup:
            lookup.accept(hit)
            break
    return lookup.close()


@pytest.mark.parametrize("machine", ["a", "b"])
def test_the_second_process_waits_for_the_first_and_hits(
    opened: Open,
    pool: ThreadPoolExecutor,
    memory: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
) -> None:
    """On another machine, it finds the uploaded entry in the bucket, and the lease is removed."""
    monkeypatch.setattr(leases, "_FIRST_PAUSE_S", 0.05)
    is_far, claimed = machine != "a", list[WaitOutcome | None]()
    options = {"leases": "on"} if is_far else {}
    first, second = opened("a", **options), opened(machine, **options)
    assert isinstance(looked_up(first, claimed), Miss)
    other = pool.submit(looked_up, second, [])
    time.sleep(0.3)
    assert not other.done()
    first.save(KEY, entry(KEY), kind="fx", delayed=not is_far)
    claim_of(claimed).release(published=True)
    found = other.result(LONG_S)
    assert isinstance(found, Hit)
    assert found.tier == ("remote" if is_far else "local")
    assert counts(second)["waits"] == 1
    assert counts(second)["waited_s"] >= 0.1
    assert counts(first)["waits"] == 0
    eventually(lambda: not any(name.startswith(leases.PREFIX) for name in names(memory)))


def test_an_entry_that_several_processes_save_is_uploaded_once(
    opened: Open, memory: MemoryStore
) -> None:
    first, second = opened(), opened()
    for engine in (first, second):
        engine.save(KEY, entry(KEY), once=True)
    assert first.flush(LONG_S).complete
    assert second.flush(LONG_S).complete
    assert [first.stats().uploaded, second.stats().uploaded] == [1, 0]
    assert len(names(memory)) == 1
    third = opened()
    third.save(KEY, entry(KEY), once=True)
    assert third.flush(LONG_S).complete
    assert third.stats().uploaded == 0


@pytest.mark.parametrize(
    "options", [{"on_miss": "compile"}, {"on_miss": "error"}, {"wait_s": 0}, {"mode": "read-only"}]
)
def test_no_process_waits_if_its_settings_rule_it_out(opened: Open, options: Any) -> None:
    claimed: list[WaitOutcome | None] = []
    looked_up(opened(), claimed)
    assert isinstance(looked_up(opened(**options), claimed), Miss)
    assert claimed[1] is None


def test_a_wait_that_times_out_is_the_reason_of_the_miss(opened: Open) -> None:
    looked_up(opened(), [])
    found = looked_up(opened(wait_s=0.2), [])
    assert isinstance(found, Miss)
    assert found.reason is WAITED


def test_a_fork_that_hangs_delays_others_by_a_bound_of_its_own_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork may hang in torch, waiting for a thread that only its parent has."""

    def claims() -> Claims:
        disk = DiskTier(str(tmp_path), max_bytes=2**30, max_files=100)
        return Claims(disk, fork_bound_s=0.4, notice_s=0.2)

    ready, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            claims().take(KEY, LONG_S)
            os.write(told, b".")
            time.sleep(LONG_S)
        finally:
            os._exit(1)
    try:
        os.read(ready, 1)
        ours = claims()
        with contextlib.closing(ours.disk):
            waited = ours.take(KEY, LONG_S)
            assert waited.timed_out
            assert 0.4 <= waited.seconds < 5
            assert ours.take("another", LONG_S).claim is not None
            assert ours.take(KEY, LONG_S).seconds < 0.4  # it is not waited for again
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    (line,) = caplog.messages
    assert f"for process {child}@" in line


# -- across machines


def plant(store: MemoryStore, key: str, holder: str) -> None:
    """Write a lease that a machine seems to hold."""
    row = hashlib.sha256(key.encode()).hexdigest()[:32]
    put = store.put(f"{leases.PREFIX}{row}/00000000", holder.encode(), mode="create")
    asyncio.run(put)


def test_planted_leases_delay_a_machine_by_the_bound_of_one_wait(
    opened: Open, memory: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """For all keys, holders and processes together; after that, the machine compiles at once."""
    bound_s, keys = 1.0, [f"{number:064x}" for number in range(6)]
    for key in keys:
        plant(memory, key, f"1@{key[-4:]}")
    processes = opened("a", leases="on"), opened("a", leases="on")
    for number, key in enumerate(keys):
        claimed: list[WaitOutcome | None] = []
        engine = processes[number % 2]
        assert looked_up(engine, claimed, key, bound_s).__class__ is Miss
        claim_of(claimed).release(published=False)
    assert bound_s <= sum(counts(each)["waited_s"] for each in processes) < 2 * bound_s
    assert "waiting for leases gave no entry" in caplog.text


def test_a_wait_that_gives_an_entry_does_not_count(
    opened: Open,
    pool: ThreadPoolExecutor,
    memory: MemoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fleet that starts cold may wait for each of its graphs."""
    monkeypatch.setattr(leases, "_FIRST_PAUSE_S", 0.05)
    first, second = opened("a"), opened("b", leases="on")
    plant(memory, KEY, "1@first")
    other = pool.submit(looked_up, second, [])
    time.sleep(0.3)
    first.save(KEY, entry(KEY), kind="fx")
    assert isinstance(other.result(LONG_S), Hit)
    assert counts(second)["waited_s"] >= 0.1
    with contextlib.closing(DiskTier(str(tmp_path / "b"), max_bytes=2**30, max_files=100)) as disk:
        assert Claims(disk).wasted_s() == 0


def test_no_lease_is_written_by_default_or_with_leases_off(
    opened: Open, memory: MemoryStore
) -> None:
    for options in ({}, {"leases": "off"}):
        claimed: list[WaitOutcome | None] = []
        looked_up(opened("a", **options), claimed)
        claim_of(claimed).release(published=False)
    assert names(memory) == []


def test_no_machine_waits_if_the_bucket_denies_leases(
    opened: Open, memory: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    claimed: list[WaitOutcome | None] = []
    denying = DenyingStore(memory, lambda _, key: key.startswith(leases.PREFIX))
    engine = opened("a", denying, leases="on")
    assert isinstance(looked_up(engine, claimed), Miss)
    assert claim_of(claimed).end_lease is None
    assert "no machine waits" in caplog.text


# -- in a job of several ranks


def test_a_wait_is_bounded_by_the_time_out_of_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dist = pytest.importorskip("torch.distributed")
    from torch._C._distributed_c10d import HashStore

    assert group_timeout_s() == math.inf
    store = HashStore()
    store.set_timeout(timedelta(seconds=90))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert group_timeout_s() == 90
