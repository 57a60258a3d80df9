"""What one process of a machine, or one machine, compiles, others wait for and find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from s3cache.cache import Engine, Hit, Miss
from s3cache.stats import Reason, Usage
from s3cache.store import MemoryStore, WrapperStore
from s3cache.tier import leases
from s3cache.tier.claims import Waited
from tests.support.caching import entry, open_engine
from tests.support.stores import names
from tests.support.waiting import LONG_S

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


def looked_up(engine: Engine, claimed: list[Waited | None]) -> Hit | Miss:
    """Look a graph up as hooks do, and keep what became of the claim."""

    def claim() -> Waited | None:
        claimed.append(engine.claim(KEY, LONG_S))
        return claimed[-1]

    with engine.candidates(KEY, "fx", claim=claim, handed=True) as lookup:
        for hit in lookup:
            lookup.accept(hit)
            break
    return lookup.close()


def test_the_second_process_waits_for_the_first_and_hits(
    opened: Open, pool: ThreadPoolExecutor
) -> None:
    first, second, claimed = opened(), opened(), list[Waited | None]()
    assert looked_up(first, claimed).__class__ is Miss
    (mine,) = claimed
    assert mine is not None
    assert mine.claim is not None
    other = pool.submit(looked_up, second, [])
    time.sleep(0.2)
    assert not other.done()
    first.save(KEY, entry(KEY), level="fx", provisional=True)
    mine.claim.release(landed=True)
    found = other.result(LONG_S)
    assert isinstance(found, Hit)
    assert found.tier == "local"
    assert second.stats().fx.waits == 1
    assert second.stats().fx.waited_s >= 0.1
    assert first.stats().fx.waits == 0


def test_one_that_is_late_finds_what_was_superseded_meanwhile(opened: Open) -> None:
    """As long as its maker lives: then it is gone, as nothing needs it any more."""
    first, late, claimed = opened(), opened(), list[Waited | None]()
    looked_up(first, claimed)
    assert claimed[0] is not None
    assert claimed[0].claim is not None
    first.save(KEY, entry(KEY), level="fx", provisional=True)
    claimed[0].claim.release(landed=True)
    first.supersede(KEY, entry(KEY).header.variant)
    with first.candidates(KEY, "fx") as lookup:
        assert list(lookup) == []
    again: list[Waited | None] = []
    assert isinstance(looked_up(late, again), Hit)
    assert again[0] is not None
    assert again[0].claim is not None
    again[0].claim.release(landed=True)
    mine: list[Waited | None] = []
    assert isinstance(looked_up(first, mine), Miss)  # no process would save it then
    assert mine[0] is not None
    assert mine[0].claim is not None
    mine[0].claim.release(landed=False)
    first.close()
    assert isinstance(looked_up(late, again), Miss)
    assert late.stats().local == Usage(0, 0)


def test_what_another_process_has_saved_meanwhile_is_uploaded_once(
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
def test_none_waits_where_that_is_not_wanted(opened: Open, options: Any) -> None:
    claimed: list[Waited | None] = []
    looked_up(opened(), claimed)
    assert isinstance(looked_up(opened(**options), claimed), Miss)
    assert claimed[1] is None


def test_a_wait_in_vain_is_the_reason_of_the_miss(opened: Open) -> None:
    looked_up(opened(), [])
    found = looked_up(opened(wait_s=0.2), [])
    assert isinstance(found, Miss)
    assert found.reason is Reason.WAITED


# -- across machines


def test_the_second_machine_waits_for_the_first(
    opened: Open, pool: ThreadPoolExecutor, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And finds what it has uploaded, in the bucket; the lease is removed."""
    monkeypatch.setattr(leases, "_FIRST_PAUSE_S", 0.05)
    first, second = opened("a", leases="on"), opened("b", leases="on")
    claimed: list[Waited | None] = []
    assert isinstance(looked_up(first, claimed), Miss)
    other = pool.submit(looked_up, second, [])
    time.sleep(0.5)
    assert not other.done()
    first.save(KEY, entry(KEY), level="fx")
    assert claimed[0] is not None
    assert claimed[0].claim is not None
    claimed[0].claim.release(landed=True)
    found = other.result(LONG_S)
    assert isinstance(found, Hit)
    assert found.tier == "remote"
    assert second.stats().fx.waits == 1
    deadline = time.monotonic() + LONG_S
    while any(name.startswith(leases.PREFIX) for name in names(memory)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_machines_do_not_compete_where_they_are_not_to(opened: Open, memory: MemoryStore) -> None:
    for options in ({}, {"leases": "off"}):
        claimed: list[Waited | None] = []
        looked_up(opened("a", **options), claimed)
        assert claimed[0] is not None
        assert claimed[0].claim is not None
        claimed[0].claim.release(landed=False)
    assert names(memory) == []


def test_a_bucket_that_does_not_answer_keeps_no_machine_waiting(
    opened: Open, memory: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(WrapperStore):
        async def _around(self, verb: Any, key: str, call: Any) -> Any:
            if key.startswith(leases.PREFIX):
                from s3cache.errors import AccessDeniedError

                raise AccessDeniedError("denied", op=verb)
            return await call()

    claimed: list[Waited | None] = []
    engine = opened("a", Refusing(memory), leases="on")
    assert isinstance(looked_up(engine, claimed), Miss)
    assert claimed[0] is not None
    assert claimed[0].claim is not None
    assert claimed[0].claim.end_lease is None
    assert "no machine waits" in caplog.text
