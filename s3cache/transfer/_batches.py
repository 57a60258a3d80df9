"""Blocking work for many small objects, a batch at a time on one worker thread.

A thread that only does short system calls beside a busy event loop has to win the interpreter's
lock back after each of them. One such thread at a time, with all the work that has come up
meanwhile, costs a fraction of a thread for each object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["SMALL_BYTES", "Batches", "each"]

#: The digest of so much takes about 0.1 ms, as long as handing it to another thread.
SMALL_BYTES = 256 << 10

_T = TypeVar("_T")
_R = TypeVar("_R")


class Batches(Generic[_T, _R]):
    """Calls ``work`` on a worker thread with whatever came since it was called the last time.

    Args:
        work: gives for each item, in their order, its result or the exception to raise; what it
            raises itself is raised for all.
        linger_s: how long the first item of a batch waits for others.
    """

    def __init__(
        self, work: Callable[[list[_T]], list[_R | Exception]], *, linger_s: float
    ) -> None:
        self._work = work
        self._linger_s = linger_s
        # Touched on the loop only.
        self._waiting: list[tuple[_T, asyncio.Future[_R]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, item: _T) -> _R:
        """The result for ``item``; raises what ``work`` gives or raises for it."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_R] = loop.create_future()
        self._waiting.append((item, done))
        if self._worker is None:
            self._worker = loop.create_task(self._run())
        return await done

    async def _run(self) -> None:
        wanted: list[tuple[_T, asyncio.Future[_R]]] = []
        try:
            while self._waiting:
                await asyncio.sleep(self._linger_s)
                batch, self._waiting = self._waiting, []
                wanted = [(item, done) for item, done in batch if not done.cancelled()]
                results = await asyncio.to_thread(self._all, [item for item, _ in wanted])
                for (_, done), result in zip(wanted, results, strict=True):
                    if done.cancelled():
                        continue
                    if isinstance(result, Exception):
                        done.set_exception(result)
                    else:
                        done.set_result(result)
        except BaseException:
            # Cancelled, or no threads at exit: whoever waits must hear of it.
            for _, done in [*wanted, *self._waiting]:
                done.cancel()
            self._waiting = []
            raise
        finally:
            self._worker = None

    def _all(self, items: list[_T]) -> Sequence[_R | Exception]:
        try:
            return self._work(items)
        except Exception as exc:  # noqa: BLE001 - it is raised where the items came from
            return [exc] * len(items)


def each(work: Callable[[_T], _R]) -> Callable[[list[_T]], list[_R | Exception]]:
    """Work on a batch, as :class:`Batches` wants it, that treats each item by itself."""

    def one(item: _T) -> _R | Exception:
        try:
            return work(item)
        except Exception as exc:  # noqa: BLE001 - it is raised where the item came from
            return exc

    return lambda items: [one(item) for item in items]
