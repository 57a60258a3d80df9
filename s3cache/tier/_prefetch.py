"""Prefetching: many objects in the background, as many at once as there is memory for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from s3cache.store import AcceptSize, NotAccepted
from s3cache.tier._loop import BackgroundLoop, cancel_all

__all__ = ["Budget", "Prefetch", "PrefetchReport", "Prefetches"]

# What an object takes while it arrives, in its own size, at most: the body, and pieces of it or
# what the allocator keeps of earlier ones (measured with benchmarks/storage.py).
_COPIES = 2


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


#: Fetches one object, if its size is accepted; ``None`` where there is none.
_Fetch: TypeAlias = Callable[[str, AcceptSize], Awaitable["_Sized | NotAccepted | None"]]


class Prefetches:
    """Fetches lists of objects on the background loop.

    Args:
        fetch: gets one object and lands it, unless its size is not accepted just now.
        concurrency: how many run at once.
        max_bytes: memory that they take together, unless a single one takes more.
        present: whether an object need not be fetched; called on a worker thread.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        fetch: _Fetch,
        *,
        concurrency: int,
        max_bytes: int,
        present: Callable[[str], bool],
    ) -> None:
        self._loop = loop
        self._fetch = fetch
        self._concurrency = concurrency
        self._present = present
        self.budget = Budget(max_bytes)
        self._running: set[asyncio.Task[None]] = set()  # touched on the loop only

    def start(self, names: Iterable[str]) -> Prefetch:
        """Fetch many objects in the background.

        Raises:
            ClosedError: the interpreter is exiting.
        """
        prefetch = Prefetch(list(dict.fromkeys(names)))
        prefetch.future = self._loop.submit(self._run(prefetch))
        return prefetch

    async def stop(self) -> None:
        """Cancel all that is under way."""
        await cancel_all(self._running)

    async def _run(self, prefetch: Prefetch) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        names = iter(prefetch.names)
        await asyncio.gather(*(self._work(prefetch, names) for _ in range(self._concurrency)))

    async def _work(self, prefetch: Prefetch, names: Iterator[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):  # fetching it says what is wrong
                if await asyncio.to_thread(self._present, name):
                    prefetch.count(present=1)
                    continue
            try:
                found = await self._fetch_one(name)
            except Exception as exc:  # noqa: BLE001 - whatever it is, the others go on
                prefetch.count(failed=1, error=exc)
            else:
                if found is None:
                    prefetch.count(absent=1)
                else:
                    prefetch.count(found=1, size=found.size)

    async def _fetch_one(self, name: str) -> _Sized | None:
        """Fetch an object within the budget: again, once there is memory, if it was too large."""
        held = 0

        def accept(size: int) -> bool:
            nonlocal held
            is_accepted = self.budget.grow(held, _COPIES * size)
            held = _COPIES * size if is_accepted else held
            return is_accepted

        try:
            while isinstance(answer := await self._fetch(name, accept), NotAccepted):
                self.budget.give(held)
                held = 0
                await self.budget.take(_COPIES * answer.size)
                held = _COPIES * answer.size
            return answer
        finally:
            self.budget.give(held)


class Budget:
    """Bytes that several transfers may hold at once. Used on one event loop only.

    A transfer that is alone may hold more than ``max_bytes``: otherwise it could never begin.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._given = asyncio.Event()
        self._first = asyncio.Lock()

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes are free, and hold them; who waits longest comes first."""
        async with self._first:
            while not self.grow(0, size):
                await self._given.wait()

    def grow(self, held: int, size: int) -> bool:
        """Hold ``size`` bytes instead of ``held``, if so many are free; return whether they are."""
        others = self._held - held
        if others and others + size > self._max_bytes:
            return False
        self._held = others + size
        return True

    def give(self, size: int) -> None:
        """Free ``size`` bytes."""
        self._held -= size
        self._given.set()  # wakes all that wait now
        self._given.clear()


@dataclass(frozen=True, slots=True)
class PrefetchReport:
    """How far a prefetch is.

    Attributes:
        total: objects asked for.
        present: objects that were here already.
        found: objects fetched; ``size`` their bytes together.
        absent: objects that the remote does not have.
        failed: objects that could not be had; ``error`` is the last reason.
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


class Prefetch:
    """A prefetch under way. All methods may be called from any thread but the loop's own."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.future: concurrent.futures.Future[None] | None = None
        self._report = PrefetchReport(len(names))

    def report(self) -> PrefetchReport:
        """Return how far it is now."""
        return self._report

    def wait(self, timeout_s: float | None = None) -> PrefetchReport:
        """Wait for the end, at most ``timeout_s``; return how far it got. Raises nothing."""
        if self.future is not None:
            concurrent.futures.wait([self.future], timeout_s)
        return self._report

    def cancel(self) -> None:
        """Start no more downloads; those under way still land."""
        if self.future is not None:
            self.future.cancel()

    def count(self, *, error: Exception | None = None, **more: int) -> None:
        """Add finished objects to the report; called on the loop only."""
        counts = {name: getattr(self._report, name) + number for name, number in more.items()}
        self._report = replace(self._report, error=error or self._report.error, **counts)
