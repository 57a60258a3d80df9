"""The remote tier of one process: a store behind its wrappers, downloads and uploads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from s3cache import entries
from s3cache.cache._local import verified
from s3cache.errors import ClosedError, S3CacheError
from s3cache.frame import Frame, Header
from s3cache.settings import Settings
from s3cache.store import (
    BreakerPolicy,
    BreakingStore,
    Buffer,
    MeteredStore,
    RetryingStore,
    RetryPolicy,
    Store,
)
from s3cache.store._metered import Verb, VerbStats
from s3cache.tier import LocalTier
from s3cache.transfer import (
    SMALL_BYTES,
    Batches,
    Downloads,
    Listeners,
    UploadLimits,
    Uploads,
    background,
)

__all__ = ["RemoteTier"]

_BASE_DELAY_S = 0.1
_MAX_DELAY_S = 10.0
_CLOSE_TIMEOUT_S = 5.0
# From so many downloads at once on, small ones land a few at a time, so many seconds late.
_MANY = 4
_LINGER_S = 0.003


class RemoteTier:
    """Everything of a cache that lives on the background loop.

    Args:
        store: the bare store; this object closes it.
        tier: what uploads are recorded in, if anything.
        namespace: prefix of this remote's names in the local tier.
        arrived: verifies downloaded objects and lands them, on a worker thread; what is in one
            that cannot be used does not matter to the others.
        replaces: whether an upload is to overwrite the entry with this header.
        on_problem: told of every error that ends an upload's attempt.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        tier: LocalTier | None,
        namespace: str,
        arrived: Callable[[list[tuple[str, Buffer]]], list[Frame | Exception]],
        replaces: Callable[[Header], bool],
        on_problem: Callable[[Exception], None],
        present: Callable[[str], bool],
        listeners: Listeners,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._metered = MeteredStore(store)
        self._reader = BreakingStore(
            RetryingStore(
                self._metered,
                _policy(settings, settings.attempt_timeout_s, settings.retry_timeout_s),
            ),
            BreakerPolicy(settings.breaker_failures, settings.breaker_reset_s),
        )
        # No breaker: what cannot be uploaded now is kept, and tried again after a pause.
        self._writer = RetryingStore(
            self._metered, _policy(settings, settings.upload_timeout_s, settings.upload_timeout_s)
        )
        self._arrived = arrived
        self._small: Batches[tuple[str, Buffer], Frame] = Batches(arrived, linger_s=_LINGER_S)
        self._replaces = replaces
        self._loop = background()
        self.downloads: Downloads[Frame] = Downloads(
            self._loop,
            self._fetch,
            concurrency=settings.download_concurrency,
            max_bytes=settings.prefetch_max_bytes,
            present=present,
            listeners=listeners,
        )
        self.uploads = Uploads(
            self._loop,
            self._publish,
            tier=tier,
            namespace=namespace,
            limits=UploadLimits(
                settings.upload_concurrency,
                settings.upload_queue_max_count,
                settings.upload_queue_max_bytes,
            ),
            listeners=listeners,
            on_problem=on_problem,
        )

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def breaker(self) -> str:
        """State of the circuit breaker before reads."""
        return self._reader.state

    def statistics(self) -> Mapping[Verb, VerbStats]:
        """Requests by verb, single attempts."""
        return self._metered.snapshot()

    def connect_soon(self) -> None:
        """Import and open the client on the background thread, before anybody waits for it."""
        connect = getattr(self._store, "connect", None)
        if connect is not None:
            with contextlib.suppress(ClosedError):
                self._loop.submit(_quietly(connect))

    def variants(self, key: str, timeout_s: float) -> list[str]:
        """Names of all entries under ``key`` but the first, in no set order.

        Raises:
            StoreError: the remote did not list them within ``timeout_s``.
        """
        return self.downloads.wait(self._variants(key), entries.name_prefix(key), timeout_s)

    def close(self) -> None:
        """Stop and release the connections; what is not uploaded stays recorded."""
        self.uploads.close()
        self.downloads.close()
        with contextlib.suppress(Exception):
            self._loop.wait(self._store.aclose(), _CLOSE_TIMEOUT_S)

    async def _variants(self, key: str) -> list[str]:
        first = entries.first_name(key)
        found = [info async for info in self._reader.list(entries.name_prefix(key))]
        found.sort(key=lambda info: info.modified, reverse=True)
        return [info.key for info in found if info.key != first]

    async def _fetch(self, name: str) -> Frame | None:
        data = await self._reader.get(name)
        if data is None:
            return None
        # The digest of a large one is worth a thread; a single one need not wait for others.
        if memoryview(data).nbytes > SMALL_BYTES or self.downloads.under_way < _MANY:
            [entry] = await asyncio.to_thread(self._arrived, [(name, data)])
            if isinstance(entry, Exception):
                raise entry
            return entry
        return await self._small((name, data))

    async def _publish(self, name: str, data: Buffer) -> None:
        remote_name = name[len(self._namespace) :]
        if memoryview(data).nbytes > SMALL_BYTES:
            entry = await asyncio.to_thread(verified, remote_name, data)
        else:
            entry = verified(remote_name, data)
        await entries.publish(self._writer, entry, replaces=self._replaces)


async def _quietly(connect: Callable[[], object]) -> None:
    with contextlib.suppress(S3CacheError):  # the first real call meets the same error
        await connect()  # type: ignore[misc]


def _policy(settings: Settings, attempt_timeout_s: float, total_timeout_s: float) -> RetryPolicy:
    return RetryPolicy(
        attempts=settings.retry_attempts,
        total_timeout_s=total_timeout_s,
        attempt_timeout_s=attempt_timeout_s,
        base_delay_s=_BASE_DELAY_S,
        max_delay_s=_MAX_DELAY_S,
    )
