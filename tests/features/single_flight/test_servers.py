"""Leases work on a server that takes one write of an object a second."""

from __future__ import annotations

import asyncio

from s3cache.features.single_flight.leases import Leases
from s3cache.store import RetryingStore, RetryPolicy, S3Options, S3Store
from tests.support.fakes import OneWriteASecond, serving
from tests.support.processes import KEYS


async def test_a_machine_waits_for_the_lease_of_another() -> None:
    """Five ask at once. One compiles, and the others find its entry."""
    retries = RetryPolicy(attempts=4, total_timeout_s=10, attempt_timeout_s=10)

    async def compile_once(store: RetryingStore, number: int) -> bool:
        async def is_there() -> bool:
            return await store.head("v1/entry") is not None

        waited = await Leases(store, f"node {number}").take("key", is_there, 60.0)
        if waited.lease is not None:
            await asyncio.sleep(0.5)
            await store.put("v1/entry", b"x")
            waited.lease.stop()
        return waited.is_remote

    with serving(OneWriteASecond()) as url:
        options = S3Options("bucket", "p", endpoint_url=url, **KEYS)
        stores = [RetryingStore(S3Store(options), retries) for _ in range(5)]
        outcomes = await asyncio.gather(*(compile_once(s, n) for n, s in enumerate(stores)))
        assert sorted(outcomes) == [False, True, True, True, True]
        for store in stores:
            await store.aclose()
