"""A client is replaced where its credentials are refused."""

from __future__ import annotations

from typing import Any

import pytest

from s3cache.errors import ClosedError
from s3cache.store import S3Options
from s3cache.store._s3_client import Clients
from tests.support.clock import FakeClock


class Client:
    is_open = True

    async def close(self) -> None:
        self.is_open = False


class Site:
    """Clients of a store, those that were made, and the time."""

    def __init__(self, **options: Any) -> None:
        self.made: list[Client] = []
        self.clock = FakeClock()
        self.clients = Clients(S3Options("bucket", **options), make=self.make, clock=self.clock)

    async def make(self, options: S3Options) -> Client:
        self.made.append(Client())
        return self.made[-1]

    async def call(self, *, refused: bool = False) -> Any:
        async with self.clients.use() as client:
            if refused:
                self.clients.refuse()
            return client


async def test_there_is_one_until_it_is_refused() -> None:
    site = Site()
    first = await site.call()
    assert await site.call(refused=True) is first
    second = await site.call()
    assert second is not first
    assert await site.call() is second
    assert [client.is_open for client in site.made] == [False, True]


async def test_the_one_before_lives_until_its_calls_have_ended() -> None:
    site = Site()
    async with site.clients.use() as first:
        assert await site.call(refused=True) is first
        assert await site.call() is not first
        assert [client.is_open for client in site.made] == [True, True]
    assert [client.is_open for client in site.made] == [False, True]
    await site.clients.aclose()
    assert not site.made[1].is_open
    with pytest.raises(ClosedError):
        await site.call()


@pytest.mark.parametrize(
    ("calls", "every_s", "at_least", "at_most"), [(600, 6.0, 5, 40), (4, 3600.0, 4, 4)]
)
async def test_an_hour_of_refusals_makes_a_few_dozen_clients(
    calls: int, every_s: float, at_least: int, at_most: int
) -> None:
    """As where each absent object is refused; but credentials that ended are replaced at once."""
    site = Site()
    for _ in range(calls):
        await site.call(refused=True)
        site.clock.advance(every_s)
    assert at_least <= len(site.made) <= at_most


@pytest.mark.parametrize(
    "options", [{"access_key": "a", "secret_key": "b"}, {"anonymous": True}], ids=str
)
async def test_what_was_given_to_us_stays(options: dict[str, Any]) -> None:
    site = Site(**options)
    for _ in range(2):
        await site.call(refused=True)
    assert len(site.made) == 1
