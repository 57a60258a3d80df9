"""Prefetching: many objects in the background, as many at once as there is memory for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeAlias

from s3cache.store import AcceptSize, NotAccepted
from s3cache.tier._loop import BackgroundLoop, cancel_all

__all__ = ["Budget", "Prefetch", "PrefetchReport", "Prefetches"]

_PRESENT_AT_ONCE = 64
_SIZES_KNOWN_EVERY_S = 0.01
# What an object takes while it arrives, in its own size, at most: the body, and pieces of it or
# what the allocator keeps of earlier ones (measured with benchmarks/storage.py).
_COPIES = 2


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


#: Fetches one object, if its size is admitted; ``None`` where there is none.
_Fetch: TypeAlias = Callable[[str, AcceptSize], Awaitable["_Sized | NotAccepted | None"]]


class Prefetches:
    """Fetches lists of objects on the background loop.

    Args:
        fetch: gets one object and lands it, unless its size is not admitted just now.
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
        # Touched on the loop only.
        self._largest = 0  # bytes of the largest object got; 0: none yet
        self._absent = 0  # how often there was none
        self._running: set[asyncio.Task[None]] = set()

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
        wanted = _Wanted(prefetch, self._present)
        await asyncio.gather(*(self._work(wanted, number) for number in range(self._concurrency)))

    async def _work(self, wanted: _Wanted, number: int) -> None:
        while await wanted.more():
            if not self._largest and number > self._absent:
                await asyncio.sleep(_SIZES_KNOWN_EVERY_S)  # the first ones are under way
            elif (name := wanted.take()) is not None:
                await self._fetch_one(name, wanted)

    async def _fetch_one(self, name: str, wanted: _Wanted) -> None:
        """Fetch one object within the budget, or put it off: it is too large to be read now."""
        held = _COPIES * wanted.sizes.get(name, self._largest)

        def admit(size: int) -> bool:
            nonlocal held
            needed = max(_COPIES * size, held)
            if not self.budget.grow(held, needed):
                return False
            held = needed
            return True

        prefetch = wanted.prefetch
        await self.budget.take(held)
        try:
            answer = await self._fetch(name, admit)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the others go on
            prefetch.count(failed=1, error=exc)
        else:
            if isinstance(answer, NotAccepted):
                wanted.put_off(name, answer.size)
            elif answer is None:
                prefetch.count(absent=1)
                self._absent += 1
            else:
                prefetch.count(found=1, size=answer.size)
                self._largest = max(self._largest, answer.size)
        finally:
            self.budget.give(held)


class _Wanted:
    """What one prefetch has still to fetch; ``sizes`` are the bytes of what was put off."""

    def __init__(self, prefetch: Prefetch, present: Callable[[str], bool]) -> None:
        self.prefetch = prefetch
        self.sizes: dict[str, int] = {}
        self._present = present
        self._names = iter(prefetch.names)
        self._queue: deque[str] = deque()
        self._refilling = asyncio.Lock()

    async def more(self) -> bool:
        """Return whether there is more; look for it on a worker thread, many at once."""
        if self._queue:
            return True
        async with self._refilling:
            while not self._queue and (names := list(islice(self._names, _PRESENT_AT_ONCE))):
                absent = await asyncio.to_thread(self._not_present, names)
                self.prefetch.count(present=len(names) - len(absent))
                self._queue.extend(absent)
        return bool(self._queue)

    def take(self) -> str | None:
        return self._queue.popleft() if self._queue else None

    def put_off(self, name: str, size: int) -> None:
        self.sizes[name] = size
        self._queue.append(name)

    def _not_present(self, names: list[str]) -> list[str]:
        absent = []
        for name in names:
            with contextlib.suppress(Exception):  # then it is fetched, and that says what is wrong
                if self._present(name):
                    continue
            absent.append(name)
        return absent


class Budget:
    """Bytes that several transfers may hold at once. Used on one event loop only.

    A transfer that is alone may hold more than ``max_bytes``: otherwise it could never begin.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._given = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes are free, and hold them."""
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
