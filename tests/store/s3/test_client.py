"""A client is replaced where its credentials are refused."""

from __future__ import annotations

from typing import Any

import pytest

from s3cache.errors import ClosedError
from s3cache.store import S3Options
from s3cache.store.s3._client import Clients
from tests.support.clock import FakeClock


class Client:
    def __init__(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False


class Maker:
    def __init__(self) -> None:
        self.made: list[Client] = []

    async def __call__(self, options: S3Options) -> Client:
        self.made.append(Client())
        return self.made[-1]


def clients(**options: Any) -> tuple[Clients, Maker, FakeClock]:
    maker, clock = Maker(), FakeClock()
    return Clients(S3Options("bucket", **options), make=maker, clock=clock), maker, clock


async def test_there_is_one_until_it_is_refused() -> None:
    each, maker, _ = clients()
    first = await each.get()
    assert await each.get() is first
    each.refuse()
    second = await each.get()
    assert second is not first
    assert await each.get() is second
    assert len(maker.made) == 2


async def test_the_one_before_lives_until_its_calls_have_ended() -> None:
    each, maker, _ = clients()
    async with each.use():
        first = await each.get()
        each.refuse()
        async with each.use():
            assert await each.get() is not first
        assert [client.is_open for client in maker.made] == [True, True]
    assert [client.is_open for client in maker.made] == [False, True]
    await each.aclose()
    assert not maker.made[1].is_open
    with pytest.raises(ClosedError):
        await each.get()


async def test_rights_that_are_too_narrow_cost_few_clients() -> None:
    """As where each absent object is refused: an hour of that makes a few dozen clients."""
    each, maker, clock = clients()
    for _ in range(600):
        await each.get()
        each.refuse()
        clock.advance(6.0)
    assert 5 < len(maker.made) < 40


async def test_credentials_that_end_once_more_are_looked_for_at_once() -> None:
    each, maker, clock = clients()
    for _ in range(4):
        await each.get()
        each.refuse()
        await each.get()
        clock.advance(3600)
    assert len(maker.made) == 5


@pytest.mark.parametrize(
    "options", [{"access_key": "a", "secret_key": "b"}, {"anonymous": True}], ids=str
)
async def test_what_was_given_to_us_stays(options: dict[str, Any]) -> None:
    each, maker, _ = clients(**options)
    await each.get()
    each.refuse()
    await each.get()
    assert len(maker.made) == 1
