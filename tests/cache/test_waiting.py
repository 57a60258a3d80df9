"""Nobody waits for the network but a lookup, and that not for long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.cache import Cache, Hit
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from tests.cache.answers import FIRST, calls, miss
from tests.support.caching import KEY, OTHER, entry
from tests.support.stores import GatedStore, put
from tests.support.waiting import LONG_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_lookup_waits_so_long_and_the_late_result_still_lands(
    machine: Callable[..., Cache], remote: GatedStore, memory: MemoryStore, tmp_path: Path
) -> None:
    put(memory, FIRST, entry().data)
    remote.is_open = False
    cache = machine(lookup_timeout_s=0.02)
    assert miss(cache.lookup(KEY)) == Reason.TIMEOUT
    remote.is_open = True
    eventually(lambda: cache.stats().downloaded == 1)
    assert isinstance(cache.lookup(KEY), Hit)
    assert cache.stats().hits == {"local": 1, "remote": 0}
    assert calls(cache) == {"get": 1}


def test_a_server_that_never_answers_is_waited_for_as_often_as_it_may_fail(
    machine: Callable[..., Cache], remote: GatedStore, memory: MemoryStore
) -> None:
    """And is asked again later, which holds up no lookup: the answer closes the circuit."""
    put(memory, FIRST, entry().data)
    remote.is_open = False
    cache = machine(
        mode="read-only", lookup_timeout_s=0.05, breaker_failures=2, breaker_reset_s=0.3
    )
    reasons = [miss(cache.lookup(f"{number}")) for number in range(6)]
    assert reasons == [Reason.TIMEOUT] * 2 + [Reason.UNAVAILABLE] * 4
    assert cache.stats().breaker == "open"
    eventually(lambda: cache.stats().breaker == "half-open")
    assert miss(cache.lookup(KEY)) == Reason.TIMEOUT
    remote.is_open = True
    eventually(lambda: isinstance(cache.lookup(KEY), Hit))
    assert cache.stats().breaker == "closed"


def test_a_prefetched_entry_is_a_local_hit(
    machine: Callable[..., Cache], memory: MemoryStore
) -> None:
    put(memory, FIRST, entry().data)
    cache = machine()
    report = cache.prefetch([KEY, OTHER]).wait(LONG_S)
    assert (report.found, report.absent, report.complete) == (1, 1, True)
    assert isinstance(cache.lookup(KEY), Hit)
    assert cache.stats().hits == {"local": 1, "remote": 0}
    assert cache.prefetch([KEY]).wait(LONG_S).present == 1
