"""Random operations compared with a dict: two machines, one bucket, both tiers, and faults.

https://hypothesis.readthedocs.io/en/latest/stateful.html
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from s3cache import entries
from s3cache.cache import Engine, Hit, Saved
from s3cache.store import MemoryStore
from tests.support.caching import entry, open_engine, payload
from tests.support.faulty import Fault, FaultyStore, FaultyVerb
from tests.support.marks import examples
from tests.support.waiting import LONG_S

keys = st.sampled_from(["aa" * 16, "bb" * 16])
variants = st.sampled_from(["", "one", "two"])
who = st.integers(0, 1)
FAULTS = {
    "get": "error permanent truncate bit_flip",
    "get_range": "truncate bit_flip error",
    "put": "error permanent fail_after_commit",
    "list": "error",
}
faults = st.sampled_from([(verb, each) for verb in FAULTS for each in FAULTS[verb].split()])

Name = tuple[str, str]  # key and variant


# Uploads that fail pause for seconds, and a run may draw many of them.
pytestmark = pytest.mark.timeout(900)


class CacheMachine(RuleBasedStateMachine):
    """Under all faults, lookups neither raise nor return unsaved entries, and no save is lost."""

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("s3cache").setLevel(logging.CRITICAL)
        self.root = Path(tempfile.mkdtemp())
        self.memory = MemoryStore()
        self.remote = FaultyStore(self.memory, seed=0)
        self.machines = [self.open(0), self.open(1)]
        self.saved: dict[Name, set[bytes]] = {}
        # The undamaged entries on each machine's disk; lookups there must find them.
        self.sound: list[dict[Name, bytes]] = [{}, {}]
        self.number = 0

    def open(self, number: int) -> Engine:
        engine = open_engine(self.root / f"{number}", self.remote, retry_attempts=2)
        engine.start()  # as Cache.open does; adopts uploads that the last process left
        return engine

    def teardown(self) -> None:
        try:
            self.everything_arrives()
        finally:
            for engine in self.machines:
                engine.close()
            shutil.rmtree(self.root)
            logging.getLogger("s3cache").setLevel(logging.NOTSET)

    # -- what users do

    @rule(by=who, key=keys, variant=variants)
    def save(self, by: int, key: str, variant: str) -> None:
        self.number += 1
        content = f"{self.number} {key} {variant} ".encode() * 20
        saved = self.machines[by].save(key, entry(key, variant, content))
        assert isinstance(saved, Saved)
        assert saved.durable
        self.saved.setdefault((key, variant), set()).add(content)
        self.sound[by][key, variant] = content

    @rule(by=who, key=keys, variant=variants)
    def look_up(self, by: int, key: str, variant: str) -> None:
        found = self.machines[by].lookup(key, lambda each: each.header.variant == variant)
        if isinstance(found, Hit):
            assert found.entry.header.key == key
            assert payload(found.entry) in self.saved[key, variant]
        else:
            assert (key, variant) not in self.sound[by], found

    @rule(by=who, key=keys)
    def look_at_all(self, by: int, key: str) -> None:
        found = [hit.entry for hit in self.machines[by].candidates(key)]
        assert len({each.header.variant for each in found}) == len(found)
        for each in found:
            assert payload(each) in self.saved[key, each.header.variant]
        mine = {variant for at, variant in self.sound[by] if at == key}
        assert mine <= {each.header.variant for each in found}

    @rule(by=who, some=st.lists(keys, unique=True))
    def prefetch(self, by: int, some: list[str]) -> None:
        assert self.machines[by].prefetch(some).wait(LONG_S).complete

    @rule(by=who)
    def flush(self, by: int) -> None:
        self.machines[by].flush(20)

    # -- faults and restarts

    @rule(fault=faults, times=st.integers(1, 3))
    def fail(self, fault: tuple[FaultyVerb, Fault], times: int) -> None:
        self.remote.inject(*fault, times=times)

    def is_all_uploaded(self, by: int) -> bool:
        self.machines[by].flush(20)
        return not self.machines[by].flush(0).remaining

    @rule(by=who)
    def restart(self, by: int) -> None:
        self.machines[by].close(timeout_s=0)
        self.machines[by] = self.open(by)

    @rule(by=who, key=keys, variant=variants, at=st.floats(0, 1, exclude_max=True))
    def damage_a_file(self, by: int, key: str, variant: str, at: float) -> None:
        """Damage the file of an uploaded entry; damage to any other would lose it."""
        if not self.is_all_uploaded(by):
            return
        name = entries.variant_name(key, variant).rpartition("/")[2]
        for path in (self.root / f"{by}" / "objects").rglob(name):
            data = bytearray(path.read_bytes())
            data[int(at * len(data))] ^= 1
            path.write_bytes(data)
            self.sound[by].pop((key, variant), None)

    @rule(by=who)
    def lose_the_disk(self, by: int) -> None:
        """Replace a machine that has uploaded everything with an empty one."""
        if not self.is_all_uploaded(by):
            return
        self.machines[by].close()
        shutil.rmtree(self.root / f"{by}")
        self.machines[by] = self.open(by)
        self.sound[by] = {}

    # -- at the end

    def everything_arrives(self) -> None:
        self.remote.clear()
        for by in (0, 1):
            report = self.machines[by].flush(20)
            assert report.complete, report
        newcomer = open_engine(self.root / "new", self.remote)
        for key in {key for key, _ in self.saved}:
            found = {hit.entry.header.variant for hit in newcomer.candidates(key)}
            assert found == {variant for at, variant in self.saved if at == key}
        newcomer.close()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=examples(0.5),
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
