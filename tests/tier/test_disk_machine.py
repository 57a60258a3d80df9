"""The local tier compared with a dict: two tiers over one root, as of two processes.

https://hypothesis.readthedocs.io/en/latest/stateful.html
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from s3cache.errors import NoSpaceError
from s3cache.stats import Usage
from s3cache.store import ObjectFiles
from s3cache.tier import DiskTier
from tests.support.marks import examples

MAX_BYTES = 1_000
MAX_FILES = 12

# More names than fit, but few, so that rules use the same one.
names = st.sampled_from([f"{c}/{i}" for c in ("a", "b-", "c=") for i in range(6)])
sizes = st.one_of(st.integers(0, 90), st.sampled_from([300, 700, 999, 1_000, 1_001]))
who = st.integers(0, 1)


def usage_of(bodies: dict[str, bytes]) -> Usage:
    return Usage(sum(map(len, bodies.values())), len(bodies))


def fits(usage: Usage) -> bool:
    return usage.bytes <= MAX_BYTES and usage.files <= MAX_FILES


class TierMachine(RuleBasedStateMachine):
    """The tier holds the same objects as the model, for any calls in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp()) / "root"
        self.tiers = [self.open(), self.open()]
        self.bodies: dict[str, bytes] = {}  # least recently used first
        self.pins: list[set[str]] = [set(), set()]
        self.orphans: set[str] = set()
        # Unpinned, perhaps after the last scan: they may be evicted later than their age requires.
        self.late: set[str] = set()
        self.versions = 0

    def open(self) -> DiskTier:
        return DiskTier(self.root, max_bytes=MAX_BYTES, max_files=MAX_FILES)

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        shutil.rmtree(self.root.parent)

    # --- the model

    @property
    def pinned(self) -> set[str]:
        return self.pins[0] | self.pins[1] | self.orphans

    def touch(self, name: str) -> None:
        self.bodies[name] = self.bodies.pop(name)
        self.late.discard(name)

    def unpin(self, name: str) -> None:
        if name not in self.pinned:
            self.late.add(name)

    # --- the calls

    @rule(by=who, name=names, size=sizes, pending=st.booleans())
    def put(self, by: int, name: str, size: int, pending: bool) -> None:
        self.versions += 1
        body, tier = (b"%d " % self.versions * size)[:size], self.tiers[by]
        try:
            (tier.put_pending if pending else tier.put)(name, body)
        except NoSpaceError:
            self.refused(name, size)
        else:
            self.pins[by] |= {name} if pending else set()
            self.accepted(name, body)

    def evicted(self, name: str) -> list[str]:
        """Return what a put of ``name`` has evicted: the oldest objects that may be evicted."""
        present = {info.key for info in self.tiers[0].objects()}
        evicted = [key for key in self.bodies if key not in {*present, name}]
        assert not {*evicted} & self.pinned
        order = [*self.bodies]
        youngest = max((order.index(key) for key in evicted), default=-1)
        older = {key for key in order[: youngest + 1] if key not in evicted}
        assert older <= self.pinned | self.late | {name}
        return evicted

    def accepted(self, name: str, body: bytes) -> None:
        evicted = self.evicted(name)
        if evicted:  # down to nine tenths of the bounds, or as far as necessary
            old = self.bodies.get(name)
            left = usage_of({k: v for k, v in self.bodies.items() if k not in evicted[:-1]})
            with_it = Usage(left.bytes + len(body) - len(old or b""), left.files + (old is None))
            is_above = left.bytes > 0.9 * MAX_BYTES or left.files > 0.9 * MAX_FILES
            assert is_above or not fits(with_it)
        for key in evicted:
            del self.bodies[key]
        self.bodies[name] = body
        self.touch(name)
        assert fits(usage_of(self.bodies))

    def refused(self, name: str, size: int) -> None:
        """Check that the refusal is right, and that no object was evicted out of order."""
        staying = {k: v for k, v in self.bodies.items() if k in self.pinned and k != name}
        assert not fits(usage_of({**staying, name: b"x" * size}))
        evicted = self.evicted(name)
        assert not (evicted and size > MAX_BYTES)
        for key in evicted:
            del self.bodies[key]

    @rule(by=who, name=names, is_use=st.booleans())
    def get(self, by: int, name: str, is_use: bool) -> None:
        body, tier = self.bodies.get(name), self.tiers[by]
        assert (tier.head(name) is None) == (body is None)
        assert (tier.get if is_use else tier.peek)(name) == body
        if is_use and name in self.bodies:
            self.touch(name)

    @rule(by=who, name=names)
    def delete(self, by: int, name: str) -> None:
        self.tiers[by].delete(name)
        self.bodies.pop(name, None)
        self.pins[by].discard(name)
        self.unpin(name)

    @rule(by=who, name=names)
    def uploaded(self, by: int, name: str) -> None:
        self.tiers[by].forget_uploaded({name: None})
        self.pins[by].discard(name)
        self.unpin(name)

    @rule(by=who)
    def adopt(self, by: int) -> None:
        assert set(self.tiers[by].adopt()) == self.orphans
        self.pins[by] |= self.orphans
        self.orphans = set()

    @rule(by=who)
    def restart(self, by: int) -> None:
        self.tiers[by].close()
        self.tiers[by] = self.open()
        self.orphans |= self.pins[by]
        self.pins[by] = set()

    @rule(how=st.sampled_from(["missing", "empty", "torn", "garbage"]), by_hand=st.none() | names)
    def lose_the_usage(self, how: str, by_hand: str | None) -> None:
        """Damage the usage file, and perhaps remove an object by hand."""
        usage = self.root / "usage"
        if by_hand in self.bodies:
            ObjectFiles(self.root).delete(by_hand)
            del self.bodies[by_hand]
        if how == "missing":
            usage.unlink()
        else:
            old = usage.read_bytes()
            usage.write_bytes({"empty": b"", "torn": old[:10], "garbage": old[::-1]}[how])

    @precondition(lambda self: len(self.bodies) > 1)
    @rule()
    def use_all_in_another_order(self) -> None:
        for name in sorted(self.bodies):
            self.tiers[0].get(name)
            self.touch(name)

    # --- at any time

    @invariant()
    def both_hold_what_the_model_holds(self) -> None:
        sizes = {name: len(body) for name, body in self.bodies.items()}
        assert {info.key: info.size for info in self.tiers[0].objects()} == sizes
        for tier, pins in zip(self.tiers, self.pins, strict=True):
            assert tier.usage() == usage_of(self.bodies)
            assert {*tier.pending()} == pins
        assert os.listdir(self.root / "staging") == []


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=examples(0.5), stateful_step_count=40)
