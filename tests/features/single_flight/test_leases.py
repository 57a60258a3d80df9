"""Leases: one machine compiles, the others wait for it, on a clock that jumps."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from s3cache.errors import AccessDeniedError, StoreError, TransientError
from s3cache.features.single_flight.leases import PREFIX, Lease, LeaseOutcome, Leases
from s3cache.store import MemoryStore, Store, WrapperStore
from tests.support.marks import nightly, slow
from tests.support.virtual import run_virtually

BOUND_S = 600.0


class Bucket(WrapperStore):
    """A store, or a link to one, that notes the time of each request, and refuses some kinds.

    It creates nothing while it ``is_busy``, and loses the answers while it ``is_deaf``.
    """

    def __init__(self, inner: Store | None = None) -> None:
        super().__init__(inner or MemoryStore("bucket"))
        self.refused: set[str] = set()
        self.requests: list[float] = []
        self.is_busy = self.is_deaf = False

    async def _around(self, verb: Any, key: str, call: Any) -> Any:
        self.requests.append(asyncio.get_running_loop().time())
        if verb in self.refused:
            raise AccessDeniedError("denied", op=verb)
        if verb == "put" and self.is_busy:
            raise TransientError("busy", op="put")
        answer = await call()
        if verb == "put" and self.is_deaf:
            raise TransientError("no answer", op="put")
        return answer

    async def leases(self) -> list[str]:
        return [info.key async for info in self.list(PREFIX)]


class Node:
    """One machine."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self.bucket = bucket
        self.leases = Leases(bucket, name, random.Random(name))

    def published(self, key: str) -> Callable[[], Awaitable[bool]]:
        async def is_published() -> bool:
            return await self.bucket.head(f"entries/{key}") is not None

        return is_published

    async def take(self, key: str = "key", bound_s: float = BOUND_S) -> LeaseOutcome:
        return await self.leases.take(key, self.published(key), bound_s)

    async def compile(self, key: str = "key", *, seconds: float = 60.0) -> LeaseOutcome:
        """Take part as an engine does; the compiled entry is uploaded a moment later."""
        leased = await self.take(key)
        if not leased.is_remote:
            await asyncio.sleep(seconds)
            if leased.lease is not None:
                ended = asyncio.ensure_future(leased.lease.end(self.published(key)))
            await asyncio.sleep(0.5)
            await self.bucket.put(f"entries/{key}", b"entry")
            if leased.lease is not None:
                await ended
        return leased


async def led(bucket: Bucket, name: str, *, stops: bool = False) -> Lease:
    """Take the lease on a machine, which may stop to run then."""
    lease = (await Node(bucket, name).take()).lease
    assert lease is not None
    if stops:
        lease.stop()
    return lease


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def test_one_machine_compiles_and_the_others_find_its_entry(bucket: Bucket) -> None:
    """A waiting machine asks at most once a second."""

    async def job() -> list[LeaseOutcome]:
        nodes = [Node(bucket, f"node {number}") for number in range(20)]
        return await asyncio.gather(*(node.compile() for node in nodes))

    ended = run_virtually(job())
    leading = [each for each in ended if each.lease is not None]
    others = [each for each in ended if each.lease is None]
    assert len(leading) == 1
    assert all(each.is_remote and each.holder == "node 0" for each in others)
    assert all(60 <= each.seconds <= 65 for each in others)
    # The renewals, and the deletions at the end.
    assert 19 * 60 / 3 <= len(bucket.requests) <= 19 * 66 + 60 / 5 + 200
    assert run_virtually(bucket.leases()) == []


def test_a_lease_that_is_not_renewed_is_stolen_by_one_machine(bucket: Bucket) -> None:
    """By the clocks of the waiting machines, three renewals are missing; others await the thief."""

    async def job() -> list[LeaseOutcome]:
        await led(bucket, "dead", stops=True)
        await asyncio.sleep(3)
        nodes = [Node(bucket, f"node {number}") for number in range(10)]
        return await asyncio.gather(*(node.compile() for node in nodes))

    ended = run_virtually(job())
    (thief,) = [each for each in ended if each.lease is not None]
    assert thief.lease is not None
    assert thief.lease.taken_over
    assert thief.holder == "dead"
    assert 15 <= thief.seconds <= 22
    others = [each for each in ended if each is not thief]
    assert all(each.is_remote and each.holder.startswith("node") for each in others)
    assert all(each.seconds <= 22 + 66 for each in others)


def test_all_machines_continue_at_once_if_nothing_lands(bucket: Bucket) -> None:
    """A later machine leads again."""

    async def job() -> tuple[list[LeaseOutcome], LeaseOutcome]:
        first = await led(bucket, "first")
        waiting = [asyncio.ensure_future(Node(bucket, str(n)).take()) for n in range(5)]
        await asyncio.sleep(20)
        await first.end(None)
        ended = await asyncio.gather(*waiting)
        return ended, await Node(bucket, "later").take()

    ended, later = run_virtually(job())
    assert [(each.lease, each.timed_out, each.is_remote) for each in ended] == [
        (None, False, False)
    ] * 5
    assert all(20 <= each.seconds <= 30 for each in ended)
    assert later.lease is not None
    assert not later.holder


def test_a_hostile_lease_costs_the_bound_once(bucket: Bucket) -> None:
    """It is renewed forever, and nothing lands. Its holder is shown without control characters."""

    async def hostile() -> None:
        for number in range(10_000):
            for key in range(4):
                row = (await digest_row(bucket, str(key))) + f"/{number:08d}"
                await bucket.put(row, b"\x1b[31mevil\xff" * 100, mode="overwrite")
            await asyncio.sleep(5)

    async def job() -> list[LeaseOutcome]:
        evil = asyncio.ensure_future(hostile())
        await asyncio.sleep(1)
        node = Node(bucket, "node")
        ended = [await node.take(str(key), 100.0) for key in range(4)]
        evil.cancel()
        return ended

    first, *others = run_virtually(job())
    assert first.timed_out
    assert 100 <= first.seconds <= 102
    assert "evil" in first.holder
    assert "\x1b" not in first.holder
    assert len(first.holder) < 1000
    assert all(each.timed_out and each.seconds == 0 for each in others)


async def digest_row(bucket: Bucket, key: str) -> str:
    """Return the row that another node would use for a key."""
    other = Bucket()
    leased = await Node(other, "other").take(key)
    assert leased.lease is not None
    leased.lease.stop()
    (name,) = await other.leases()
    return name.rpartition("/")[0]


@pytest.mark.parametrize("refused", ["put", "all"])
def test_no_machine_waits_if_nothing_can_be_leased(bucket: Bucket, refused: str) -> None:
    bucket.refused = {"put"} if refused == "put" else {"put", "head", "get_range", "delete"}

    async def job() -> float:
        with pytest.raises(StoreError):
            await Node(bucket, "node").take()
        return asyncio.get_running_loop().time()

    assert run_virtually(job()) < 1


def test_there_are_no_leases_in_a_store_without_atomic_creation(bucket: Bucket) -> None:
    async def no() -> bool:
        return False

    bucket.atomic_create = no  # type: ignore[method-assign]
    assert run_virtually(Node(bucket, "node").take()) == LeaseOutcome()
    assert bucket.requests == []


def test_no_machine_waits_once_a_lease_shows_that_others_can_create_it_too(bucket: Bucket) -> None:
    """The server ignores the condition. A machine that waits already learns it within seconds."""
    known: list[bool | None] = [None]

    async def is_atomic() -> bool | None:
        return known[0]

    bucket.atomic_create = is_atomic  # type: ignore[method-assign]

    async def job() -> list[LeaseOutcome]:
        others = [asyncio.ensure_future(Node(bucket, f"{n}").take()) for n in range(3)]
        await asyncio.sleep(0)
        known[0] = False
        return await asyncio.gather(*others, Node(bucket, "late").take())

    ended = run_virtually(job())
    assert all(waited.lease is None and waited.seconds < 5 for waited in ended)


def test_a_role_that_may_only_create_leaves_its_leases(bucket: Bucket) -> None:
    bucket.refused = {"delete"}

    async def job() -> list[LeaseOutcome]:
        return await asyncio.gather(*(Node(bucket, str(n)).compile() for n in range(3)))

    ended = run_virtually(job())
    assert [each.is_remote for each in ended].count(True) == 2
    assert run_virtually(bucket.leases())


def test_a_slow_machine_keeps_its_lease_and_tries_failed_renewals_again(bucket: Bucket) -> None:
    """Only two renewals fail in a row, not three: no machine steals the lease."""

    async def job() -> list[LeaseOutcome]:
        leader = asyncio.ensure_future(Node(bucket, "leader").compile(seconds=500))
        await asyncio.sleep(1)
        other = asyncio.ensure_future(Node(bucket, "other").compile())
        await asyncio.sleep(3)
        bucket.is_busy = True
        await asyncio.sleep(10)
        bucket.is_busy = False
        return [await leader, await other]

    leader, other = run_virtually(job())
    assert leader.lease is not None
    assert other.is_remote


def test_a_renewal_counts_if_its_answer_is_lost(bucket: Bucket) -> None:
    """The next attempt finds the number in the store, written by the same machine."""
    deaf = Bucket(bucket)

    async def job() -> list[LeaseOutcome]:
        leading = asyncio.ensure_future(Node(deaf, "leader").compile(seconds=100))
        await asyncio.sleep(8)
        deaf.is_deaf = True
        await asyncio.sleep(3)
        deaf.is_deaf = False
        return [await Node(bucket, "other").compile(), await leading]

    other, leader = run_virtually(job())
    assert leader.lease is not None
    assert other.is_remote
    assert other.lease is None


def test_a_stolen_lease_is_held_if_the_answer_is_lost(bucket: Bucket) -> None:
    async def job() -> LeaseOutcome:
        await led(bucket, "dead", stops=True)
        deaf = Bucket(bucket)
        deaf.is_deaf = True
        return await Node(deaf, "thief").take()

    thief = run_virtually(job())
    assert thief.lease is not None
    assert thief.holder == "dead"
    assert thief.seconds <= 25


def test_a_machine_that_was_stopped_does_not_end_the_lease_of_another(bucket: Bucket) -> None:
    """It has lost its lease when it continues, and then fails to compile."""

    async def job() -> list[LeaseOutcome]:
        stopped = await led(bucket, "stopped", stops=True)
        await asyncio.sleep(1)
        thief = asyncio.ensure_future(Node(bucket, "thief").compile(seconds=60))
        waiting = asyncio.ensure_future(Node(bucket, "waiting").compile())
        while len(await bucket.leases()) == 1:
            await asyncio.sleep(0.1)
        await stopped.end(None)
        return [await thief, await waiting]

    thief, waiting = run_virtually(job())
    assert sorted([thief.is_remote, waiting.is_remote]) == [False, True]


# -- mishaps of the machine that leads


STEPS = ("lease", "compile", "save", "upload")
DEEDS = ("kill", "stop", "cut", "slow", "fail")


class Way(Bucket):
    """A node's link to the bucket, which may be cut or slow."""

    def __init__(self, bucket: Bucket, draw: random.Random) -> None:
        super().__init__(bucket)
        self._draw = draw
        self.is_cut, self.delay_s = False, 0.0

    async def _around(self, verb: Any, key: str, call: Any) -> Any:
        await asyncio.sleep(self._draw.uniform(0.01, 0.2) + self.delay_s)
        if self.is_cut:
            raise TransientError("no route to host", op=verb)
        return await call()


class Trial:
    """Some nodes that need one entry, with mishaps to the first leaders."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.bucket = Bucket()
        self.victims = self.draw.randint(1, 2)
        self.compiled = 0
        self.ended: list[float] = []

    async def node(self, number: int) -> None:
        way = Way(self.bucket, self.draw)
        node = Node(way, f"node {number}")
        await asyncio.sleep(self.draw.uniform(0, 3))
        began, lease = asyncio.get_running_loop().time(), None
        try:
            leased = await node.take(bound_s=120.0)
        except StoreError:
            leased = LeaseOutcome()
        lease = leased.lease
        deed, step = "", ""
        if lease is not None and self.victims:
            self.victims -= 1
            deed, step = self.draw.choice(DEEDS), self.draw.choice(STEPS)
        try:
            if leased.is_remote:
                assert await self._right(way)
            else:
                await self._compile(way, node, lease, deed, step)
        except _Killed:
            node.leases.stop()
            return
        self.ended.append(asyncio.get_running_loop().time() - began)

    async def _right(self, way: Way) -> bool:
        while True:
            with contextlib.suppress(TransientError):
                return bytes(await way.get("entries/key") or b"") == b"entry"
            await asyncio.sleep(1)

    async def _compile(
        self, way: Way, node: Node, lease: Lease | None, deed: str, step: str
    ) -> None:
        async def reached(name: str) -> None:
            if name != step:
                return
            if deed in ("kill", "fail"):
                raise _Killed if deed == "kill" else RuntimeError
            if deed == "stop":  # it does not run for this long
                way.is_cut = True
                await asyncio.sleep(self.draw.uniform(5, 200))
                way.is_cut = False
            elif deed == "cut":
                way.is_cut = True
                asyncio.get_running_loop().call_later(
                    self.draw.uniform(5, 100), setattr, way, "is_cut", False
                )
            elif deed == "slow":
                way.delay_s = self.draw.uniform(1, 8)

        self.compiled += 1
        is_saved = False
        try:
            await reached("lease")
            await asyncio.sleep(self.draw.uniform(5, 40))
            await reached("compile")
            is_saved = True
            await reached("save")
            while True:  # uploads are tried again on this machine until they succeed
                try:
                    await way.put("entries/key", b"entry")
                    break
                except TransientError:
                    await asyncio.sleep(1)
            await reached("upload")
        except RuntimeError:
            pass
        finally:
            if lease is not None and lease in node.leases.held:
                await lease.end(node.published("key") if is_saved else None)


class _Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "group", [0, *(pytest.param(n, marks=slow if n < 4 else nightly) for n in range(1, 10))]
)
def test_no_machine_waits_beyond_the_bound_after_mishaps_of_the_leader(group: int) -> None:
    """60 trials per group: no machine hangs beyond the bound, and found entries are right."""
    for seed in range(60 * group, 60 * (group + 1)):
        trial = Trial(seed)

        async def job(trial: Trial = trial) -> None:
            nodes = [trial.node(number) for number in range(trial.draw.randint(3, 6))]
            await asyncio.wait_for(asyncio.gather(*nodes), 1_000)

        run_virtually(job())
        assert trial.ended, seed
        # A wait up to the bound, and then a compile, which may have a mishap too.
        assert max(trial.ended) <= 120 + 40 + 330, (seed, trial.ended)
