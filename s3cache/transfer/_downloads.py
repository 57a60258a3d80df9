"""Downloads that are shared by whoever wants the same object, and prefetching."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from s3cache.errors import ClosedError, TransientError
from s3cache.store._sizes import sizes_told_to
from s3cache.transfer._budget import Budget
from s3cache.transfer._events import Listeners, TransferEvent
from s3cache.transfer._loop import BackgroundLoop, cancelled

__all__ = ["DownloadTimeoutError", "Downloads", "Prefetch", "PrefetchReport"]


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


_CLOSE_TIMEOUT_S = 5.0
_PRESENT_AT_ONCE = 64
_SIZES_KNOWN_EVERY_S = 0.01
# What an object takes while it arrives, in its own size, at most: the body, and pieces of it or
# what the allocator keeps of earlier ones (measured with benchmarks/storage.py).
_COPIES = 2
_T = TypeVar("_T", bound=_Sized)
_R = TypeVar("_R")


class Downloads(Generic[_T]):
    """Fetches objects on the background loop, each at most once at a time.

    Args:
        fetch: gets, verifies and lands one object; ``None`` where there is none.
        concurrency: how many prefetches run at once. Lookups do not wait for them.
        max_bytes: memory that prefetches take together, unless a single one takes more.
        present: whether an object need not be prefetched; called on a worker thread.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        fetch: Callable[[str], Awaitable[_T | None]],
        *,
        concurrency: int,
        max_bytes: int,
        present: Callable[[str], bool],
        listeners: Listeners,
    ) -> None:
        self._loop = loop
        self._fetch = fetch
        self._concurrency = concurrency
        self._budget = Budget(max_bytes)
        self._present = present
        self._listeners = listeners
        # Touched on the loop only.
        self._tasks: dict[str, asyncio.Task[_T | None]] = {}
        self._largest = 0  # bytes of the largest object that a prefetch got; 0: none yet
        self._none = 0  # how often there was none
        self._prefetching: set[asyncio.Task[None]] = set()
        self._stopped = False

    def get(self, name: str, timeout_s: float) -> _T | None:
        """The object, from a download already under way if there is one.

        After ``timeout_s`` the caller is let go, but the download goes on and lands.

        Raises:
            DownloadTimeoutError: nothing within ``timeout_s``.
            ClosedError: :meth:`close` was called, perhaps while this waited.
            RuntimeError: called on the loop's own thread.
            S3CacheError: as ``fetch`` does.
        """
        return self.wait(self._insist(name), name, timeout_s)

    def wait(self, work: Coroutine[Any, Any, _R], name: str, timeout_s: float) -> _R:
        """The result of a coroutine on the loop, with the same patience."""
        try:
            return self._loop.wait(work, timeout_s)
        except concurrent.futures.TimeoutError:
            raise DownloadTimeoutError(
                f"no answer within {timeout_s:.3g} s", op="get", key=name
            ) from None

    def prefetch(self, names: Iterable[str]) -> Prefetch:
        """Fetch many objects in the background.

        Raises:
            ClosedError: the interpreter is exiting.
        """
        prefetch = Prefetch(list(dict.fromkeys(names)))
        prefetch.future = self._loop.submit(self._prefetch(prefetch))
        return prefetch

    @property
    def under_way(self) -> int:
        """How many downloads there are just now."""
        return len(self._tasks)

    def close(self) -> None:
        """Cancel what is under way; whoever waits for it gets :class:`ClosedError`."""
        with contextlib.suppress(ClosedError, concurrent.futures.TimeoutError):
            self._loop.wait(self._stop(), _CLOSE_TIMEOUT_S)

    async def _join(self, name: str) -> _T | None:
        if self._stopped:
            raise ClosedError("the cache was closed")
        task = self._tasks.get(name)
        if task is None:
            task = self._tasks[name] = asyncio.ensure_future(self._run(name))
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
            # With every waiter gone nobody would ask for the error: that is no mistake here.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([task])  # unlike awaiting it, leaves it alone when cancelled
        if task.cancelled() and not self._stopped:
            raise _PostponedError
        return task.result()

    async def _insist(self, name: str) -> _T | None:
        """For whoever waits, memory is no reason to put a download off."""
        while True:
            try:
                return await self._join(name)
            except _PostponedError:
                continue

    async def _stop(self) -> None:
        self._stopped = True
        await cancelled([*self._prefetching, *self._tasks.values()])

    async def _run(self, name: str) -> _T | None:
        self._listeners.emit(TransferEvent("download", "started", name))
        try:
            result = await self._fetch(name)
        except Exception as exc:
            self._listeners.emit(TransferEvent("download", "failed", name, error=exc))
            raise
        if result is None:
            self._listeners.emit(TransferEvent("download", "absent", name))
        else:
            self._listeners.emit(TransferEvent("download", "done", name, result.size))
        return result

    async def _prefetch(self, prefetch: Prefetch) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._prefetching.add(task)
        task.add_done_callback(self._prefetching.discard)
        names = iter(prefetch.names)
        wanted: deque[str] = deque()
        refilling = asyncio.Lock()

        async def refill() -> bool:
            """Whether there is more to fetch; looks for it on a worker thread, many at once."""
            async with refilling:
                while not wanted and (some := list(islice(names, _PRESENT_AT_ONCE))):
                    absent = await asyncio.to_thread(self._absent, some)
                    prefetch.count(present=len(some) - len(absent))
                    wanted.extend(absent)
            return bool(wanted)

        async def work(number: int) -> None:
            while wanted or await refill():
                if not self._largest and number > self._none:
                    await asyncio.sleep(_SIZES_KNOWN_EVERY_S)  # the first ones are under way
                elif wanted:
                    name = wanted.popleft()
                    if not await self._prefetch_one(name, sizes, prefetch):
                        wanted.append(name)

        sizes: dict[str, int] = {}  # of those that were put off
        await asyncio.gather(*map(work, range(self._concurrency)))

    async def _prefetch_one(self, name: str, sizes: dict[str, int], prefetch: Prefetch) -> bool:
        """Fetch one object within the budget; ``False``: it is too large to be read just now."""
        held = _COPIES * sizes.get(name, self._largest)

        def told(size: int) -> None:
            nonlocal held
            wanted = _COPIES * size
            if wanted > held:
                if not self._budget.grow(held, wanted):
                    sizes[name] = size
                    raise asyncio.CancelledError(f"{size} bytes are too many just now")
                held = wanted

        await self._budget.take(held)
        try:
            with sizes_told_to(told):
                result = await self._join(name)
            if result is None:
                prefetch.count(absent=1)
                self._none += 1
            else:
                prefetch.count(found=1, size=result.size)
                self._largest = max(self._largest, result.size)
        except _PostponedError:
            return False
        except Exception as exc:  # noqa: BLE001 - whatever it is, the others go on
            prefetch.count(failed=1, error=exc)
        finally:
            self._budget.give(held)
        return True

    def _absent(self, names: list[str]) -> list[str]:
        absent = []
        for name in names:
            with contextlib.suppress(Exception):  # then it is fetched, and that says what is wrong
                if self._present(name):
                    continue
            absent.append(name)
        return absent


class _PostponedError(Exception):
    """A prefetch was told to wait until there is memory for it."""


class DownloadTimeoutError(TransientError):
    """The caller's patience ended; the download goes on."""


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
        """How far it is now."""
        return self._report

    def wait(self, timeout_s: float | None = None) -> PrefetchReport:
        """Wait for the end, at most ``timeout_s``; says how far it got. Raises nothing."""
        if self.future is not None:
            concurrent.futures.wait([self.future], timeout_s)
        return self._report

    def cancel(self) -> None:
        """Start no more downloads; those under way still land."""
        if self.future is not None:
            self.future.cancel()

    def count(
        self,
        *,
        present: int = 0,
        found: int = 0,
        size: int = 0,
        absent: int = 0,
        failed: int = 0,
        error: Exception | None = None,
    ) -> None:
        """Book finished objects; called on the loop only."""
        now = self._report
        self._report = replace(
            now,
            present=now.present + present,
            found=now.found + found,
            size=now.size + size,
            absent=now.absent + absent,
            failed=now.failed + failed,
            error=error or now.error,
        )
