"""Prefetches in the background, within a budget of memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from s3cache.store import AcceptSize, NotAccepted

if TYPE_CHECKING:
    from s3cache.frame import Frame

# Peak memory of a download, in multiples of its size: the body, and pieces of it or memory that the
# allocator keeps from earlier ones (measured with benchmarks/storage.py).
_COPIES = 2
# Memory reserved for a download until the typical size is known.
_EXPECTED_BYTES = _COPIES * (16 << 20)
# A search on the disk costs two thread switches, for one name or for this many.
_LOOKED_FOR_AT_ONCE = 32


class Budget:
    """A limit on the bytes that concurrent transfers hold. Used on one event loop only.

    A transfer that is alone may hold more than ``max_bytes``: otherwise it could never begin.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held = 0
        self._given = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes are free, and hold them."""
        while not self.grow(0, size):
            await self._given.wait()

    def grow(self, held: int, size: int) -> bool:
        """Hold ``size`` bytes instead of ``held``, if they are free; return whether they are."""
        others = self._held - held
        if others and others + size > self.max_bytes:
            return False
        self._held = others + size
        if size < held:
            self._given.set()  # wakes all current waiters
            self._given.clear()
        return True

    def give(self, size: int) -> None:
        self.grow(size, 0)


@dataclass(frozen=True, slots=True)
class PrefetchReport:
    """The progress of a prefetch of ``total`` objects.

    ``present`` were here already, ``found`` were fetched (``size`` bytes in all), ``absent`` are
    not in the remote, and ``failed`` could not be fetched; ``error`` is the last reason.
    """

    total: int
    present: int = 0
    found: int = 0
    size: int = 0
    absent: int = 0
    failed: int = 0
    error: Exception | None = None

    @property
    def complete(self) -> bool:
        return self.present + self.found + self.absent + self.failed == self.total


#: Fetches one object, if its size is accepted; ``None`` if there is none.
Fetch: TypeAlias = "Callable[[str, AcceptSize], Awaitable[Frame | NotAccepted | None]]"
#: Returns the names of a list that are present; called on other threads.
Present: TypeAlias = Callable[[list[str]], list[str]]


class Prefetch:
    """A running prefetch. All methods may be called from any thread but the loop's own."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = [*dict.fromkeys(names)]
        self.future: concurrent.futures.Future[None] | None = None
        self._expected = 0
        self._report = PrefetchReport(len(self.names))

    def report(self) -> PrefetchReport:
        """Return the current progress."""
        return self._report

    def wait(self, timeout_s: float | None = None) -> PrefetchReport:
        """Wait at most ``timeout_s`` for the end; return the progress. Raises nothing."""
        if self.future is not None:
            concurrent.futures.wait([self.future], timeout_s)
        return self._report

    def cancel(self) -> None:
        """Start no more downloads; running ones still finish."""
        if self.future is not None:
            self.future.cancel()

    def count(self, *, error: Exception | None = None, **more: int) -> None:
        """Add finished objects to the report."""
        counts = {name: getattr(self._report, name) + number for name, number in more.items()}
        self._report = replace(self._report, error=error or self._report.error, **counts)

    async def run(self, fetch: Fetch, present: Present, budget: Budget, concurrency: int) -> None:
        """Fetch all missing objects, as many at once as the budget allows; on the loop."""
        names, missing, looking = iter(self.names), list[str](), asyncio.Lock()
        # An object that exceeds the free memory is requested twice. To avoid that, reserve more
        # than the even share of the budget, but let at least half of the workers begin.
        self._expected = min(_EXPECTED_BYTES, 2 * budget.max_bytes // concurrency)

        async def next_missing() -> str | None:
            async with looking:
                while not missing and (some := [*itertools.islice(names, _LOOKED_FOR_AT_ONCE)]):
                    here: list[str] = []
                    with contextlib.suppress(Exception):  # the fetch will report the error
                        here = await asyncio.to_thread(present, some)
                    self.count(present=len(here))
                    missing.extend(name for name in reversed(some) if name not in here)
                return missing.pop() if missing else None

        async def work() -> None:
            while (name := await next_missing()) is not None:
                try:
                    size = await self._fetch_within(budget, fetch, name)
                except Exception as exc:  # noqa: BLE001 - whatever it is, the others go on
                    self.count(failed=1, error=exc)
                else:
                    self.count(found=size is not None, absent=size is None, size=size or 0)

        await asyncio.gather(*(work() for _ in range(concurrency)))

    async def _fetch_within(self, budget: Budget, fetch: Fetch, name: str) -> int | None:
        """Fetch an object; if it exceeds the free memory, wait for memory and fetch it again.

        Return its size, not the object: a worker would keep it in memory while it fetches the next.
        """
        held = needed = 0

        def accept(size: int) -> bool:
            nonlocal held, needed
            needed = _COPIES * size
            if is_accepted := budget.grow(held, needed):
                held = needed
            return is_accepted

        try:
            expected = self._expected  # other workers may change it
            await budget.take(expected)
            held = expected
            while isinstance(answer := await fetch(name, accept), NotAccepted):
                budget.give(held)
                held = 0
                await budget.take(needed)
                held = needed
            self._expected = (self._expected + needed) // 2
            return None if answer is None else answer.size
        finally:
            budget.give(held)
