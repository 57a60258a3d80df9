"""The state machine over stores that need no server, and over one that fails."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from s3cache.store import FileStore, MemoryStore, RetryingStore, RetryPolicy
from s3cache.testing import FaultyStore
from tests.contract.stateful import StoreMachine
from tests.support.marks import examples

if TYPE_CHECKING:
    from s3cache.store import Store
    from s3cache.testing import Fault, FaultyVerb

SETTINGS = settings(
    max_examples=examples(0.25),
    stateful_step_count=25,
)


class MemoryMachine(StoreMachine):
    def open_store(self) -> Store:
        return MemoryStore()


class LocalMachine(StoreMachine):
    def open_store(self) -> Store:
        self.directory = tempfile.TemporaryDirectory()
        return FileStore(self.directory.name)

    def teardown(self) -> None:
        super().teardown()
        self.directory.cleanup()


class FaultyMachine(StoreMachine):
    """Faults that retries must hide; ``create`` after a lost answer included.

    Never are as many faults on order as there are attempts, so the retries always win.
    """

    ATTEMPTS = 30

    def open_store(self) -> Store:
        self.faulty = FaultyStore(MemoryStore(), slow_s=0.0)
        policy = RetryPolicy(
            attempts=self.ATTEMPTS,
            total_timeout_s=60,
            attempt_timeout_s=60,
            base_delay_s=0.0,
            max_delay_s=0.0,
        )
        return RetryingStore(self.faulty, policy)

    @rule(
        verb=st.sampled_from(["get", "get_range", "head", "put", "delete", "list"]),
        times=st.integers(1, 2),
    )
    def order_errors(self, verb: FaultyVerb, times: int) -> None:
        self._order(verb, "error", times)

    @rule(verb=st.sampled_from(["put", "delete"]))
    def order_lost_answer(self, verb: FaultyVerb) -> None:
        self._order(verb, "fail_after_commit", 1)

    @rule(verb=st.sampled_from(["get", "put", "list"]))
    def order_slowness(self, verb: FaultyVerb) -> None:
        self._order(verb, "slow", 1)

    def may_seem_its_own(self, key: str, body: bytes) -> bool:
        """After a fault it cannot know whether the same bytes are from its first attempt."""
        return self.faulty.pending() > 0 and self.model.get(key) == body

    def _order(self, verb: FaultyVerb, fault: Fault, times: int) -> None:
        if self.faulty.pending() + times < self.ATTEMPTS:
            self.faulty.inject(verb, fault, times=times)


TestMemoryMachine = MemoryMachine.TestCase
TestLocalMachine = LocalMachine.TestCase
TestFaultyMachine = FaultyMachine.TestCase
for _case in (TestMemoryMachine, TestLocalMachine, TestFaultyMachine):
    _case.settings = SETTINGS
