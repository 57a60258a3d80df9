"""Leases: one machine compiles a missing entry while the others wait.

On each machine, the process that holds the claim (see ``claims``) asks for a lease in
the bucket. A lease is a row of small objects, ``leases/<digest of the key>/<number>``. Each is
created with ``If-None-Match: *``, which fails if it exists. The process that creates number 0 holds
the lease. It renews the lease by creating the next number. Another process takes it over in the
same way; if two try, one succeeds. This needs only the permission to create objects. If they may be
deleted, the holder deletes them when the entry has been uploaded.

The other processes wait and look for the entry, with at most one request a second. They take over a
lease that has not been renewed for three intervals by their own clock: clocks of machines are never
compared. A lease is advice: losing one costs time, never an entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from s3cache.errors import PreconditionError, StoreError, TransientError
from s3cache.features.single_flight.claims import WaitOutcome
from s3cache.store import Store, concurrently
from s3cache.util.logs import logger_of
from s3cache.util.text import printable

PREFIX = "leases/"
RENEWED_EVERY_S, _MISSED_RENEWALS = 5.0, 3
# Pauses between the requests of a waiting process. Every third request reads the lease, which is
# more often than it is renewed.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 1.2
_UPLOADED_AFTER = 300  # pauses in which the entry must be uploaded; after them others compile it
_REQUEST_S = 10.0  # the timeout of a request for a lease; after it this machine does not wait
_SHOWN = 200
_FAILED = "failed"

logger = logger_of("storage")


@dataclass(frozen=True)
class LeaseOutcome(WaitOutcome):
    """The outcome of an attempt to take a lease: ``lease`` is the one that was taken, or None."""

    lease: Lease | None = None


def me() -> str:
    """Return a unique name for this process in leases."""
    rank = f"rank {each}, " if (each := os.environ.get("RANK")) else ""
    return f"{os.getpid()}@{socket.gethostname()} ({rank}{secrets.token_hex(4)})"


@dataclass(eq=False)
class Lease:
    """A lease held by this machine until :meth:`end`, and renewed on the event loop until then."""

    _leases: Leases
    _row: str
    _number: int
    taken_over: bool = False
    _renewing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to renew the lease."""
        self._leases.held.add(self)
        self._renewing = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        while self in self._leases.held:  # asyncio.wait_for may lose a cancellation, see cancel_all
            await asyncio.sleep(RENEWED_EVERY_S)
            try:
                if not await self._add(self._leases.me):
                    logger.debug("lost the lease %s to another machine", self._row)
                    return
            except StoreError as exc:
                logger.debug("the lease %s could not be renewed now: %s", self._row, exc)

    async def _add(self, text: str) -> bool:
        """Create the next number; return False if another machine has created it."""
        for _ in range(2):
            number = self._number + 1
            is_new = await self._leases.create(self._row, number, text)
            if not is_new and await self._leases.read(self._row, number) != self._leases.me:
                return False
            self._number = number  # also if an earlier try created it, and its answer was lost
            if is_new:
                return True
        return False

    async def end(self, is_published: Callable[[], Awaitable[bool]] | None) -> None:
        """Let others go on as soon as ``is_published`` is true; at once without it."""
        try:
            if is_published is not None:
                for _ in range(_UPLOADED_AFTER):  # the upload is under way; we renew meanwhile
                    if await is_published():
                        break
                    await asyncio.sleep(_FIRST_PAUSE_S)
            self.stop()
            if self._renewing is not None:
                await asyncio.wait([self._renewing])
            if is_published is None:
                await self._add(_FAILED)
            else:
                await self._leases.remove(self._row)
        except StoreError as exc:
            logger.debug("the lease %s is left to expire: %s", self._row, exc)
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop renewing the lease."""
        self._leases.held.discard(self)
        if self._renewing is not None:
            self._renewing.cancel()


@dataclass(eq=False)
class Leases:
    """The leases of one process in a store. All methods run on one event loop.

    ``me`` is the name of this process in its leases; ``held`` are the leases that it renews.
    """

    _store: Store
    me: str
    _random: random.Random = field(default_factory=random.Random)
    _overdue: set[str] = field(default_factory=set)  # holders that we no longer wait for
    held: set[Lease] = field(default_factory=set)

    async def take(
        self, key: str, is_published: Callable[[], Awaitable[bool]], bound_s: float
    ) -> LeaseOutcome:
        """Lease ``key``, or wait until ``is_published`` is true, at most ``bound_s``.

        If the store has no atomic conditional writes, or refuses them, return at once without a
        lease. If the store stops answering while we wait, keep waiting.

        Raises:
            StoreError: the store cannot be reached at the start, or refuses a request.
        """
        loop = asyncio.get_running_loop()
        started, row = loop.time(), PREFIX + hashlib.sha256(key.encode()).hexdigest()[:32]
        number, holder, whom = -1, "", ""  # of the row; ``whom`` we have waited for

        def ended(**more: Any) -> LeaseOutcome:
            return LeaseOutcome(None, loop.time() - started if whom else 0.0, whom, **more)

        def begun(number: int) -> LeaseOutcome:
            lease = Lease(self, row, number, taken_over=number > 0)
            lease.begin()
            return ended(lease=lease)

        if await self._store.atomic_create() is False:
            return LeaseOutcome()
        while number < 0:  # again if the row was removed in between
            if await self.create(row, 0, self.me):
                if await self._store.atomic_create() is False:  # every machine can create it
                    await Lease(self, row, 0).end(None)
                    return LeaseOutcome()
                return begun(0)
            number, holder = await self._last(row)
            if holder == self.me:  # the answer was lost, and the store's retry found our object
                return begun(number)
        if holder == _FAILED and await self.create(row, number + 1, self.me):
            return begun(number + 1)
        renewed_at, pause_s, turn = loop.time(), _FIRST_PAUSE_S, 0
        while holder != _FAILED:
            whom, left_s = holder, bound_s - (loop.time() - started)
            if holder in self._overdue or left_s <= 0:
                self._overdue.add(holder)
                return ended(timed_out=True)
            await asyncio.sleep(min(pause_s * self._random.uniform(1.0, 1.3), max(left_s, 0.01)))
            pause_s, turn = min(1.2 * pause_s, _LONGEST_PAUSE_S), turn + 1
            try:
                if turn % 3:
                    if await is_published():
                        return ended(is_remote=True)
                    continue
                following = await self.read(row, number + 1)
                if following is not None:
                    number, holder, renewed_at = number + 1, following, loop.time()
                    if holder == self.me:  # we took it over, and the answer was lost
                        return begun(number)
                elif loop.time() - renewed_at > _MISSED_RENEWALS * RENEWED_EVERY_S:
                    if await is_published():
                        return ended(is_remote=True)
                    if await self.create(row, number + 1, self.me):
                        return begun(number + 1)
                    renewed_at = loop.time()
            except TransientError:  # the network failed, which says nothing about the holder
                renewed_at = loop.time()
        return ended()

    def stop(self) -> None:
        """Stop renewing all leases."""
        for lease in [*self.held]:
            lease.stop()

    async def create(self, row: str, number: int, text: str) -> bool:
        """Create a number of a row, or raise StoreError after 10 s; return False if it exists."""
        put = self._store.put(f"{row}/{number:08d}", text.encode(), mode="create")
        try:
            await asyncio.wait_for(put, _REQUEST_S)
        except PreconditionError:
            return False
        except asyncio.TimeoutError:
            problem = f"no answer within {_REQUEST_S:g} s"
            raise TransientError(problem, op="put", store=self._store.url, key=row) from None
        return True

    async def remove(self, row: str) -> None:
        """Remove a row, as far as the store allows it."""
        names = [name async for name, _ in self._numbers(row)]

        async def delete(name: str) -> None:
            with contextlib.suppress(StoreError):
                await self._store.delete(name)

        await concurrently(delete, names)

    async def _last(self, row: str) -> tuple[int, str]:
        """Return the last number of a row and its text; -1 if the row is gone."""
        numbers = [number async for _, number in self._numbers(row)]
        number = max(numbers, default=-1)
        said = None if number < 0 else await self.read(row, number)
        return (-1, "") if said is None else (number, said)

    async def _numbers(self, row: str) -> AsyncIterator[tuple[str, int]]:
        async for info in self._store.list(f"{row}/"):
            digits = info.key.rpartition("/")[2]
            if digits.isdecimal() and digits.isascii() and len(digits) == 8:
                yield info.key, int(digits)

    async def read(self, row: str, number: int) -> str | None:
        """Return the text of a number of a row; None if there is no such number."""
        data = await self._store.get_range(f"{row}/{number:08d}", _SHOWN)
        return None if data is None else printable(bytes(data).decode(errors="replace"))
