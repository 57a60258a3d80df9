"""Several entries under one key: none is lost, none is returned that was not accepted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from s3cache.cache import Cache, Hit, Saved
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from tests.cache.answers import hit, miss, variant_is
from tests.support.caching import KEY, entry
from tests.support.waiting import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from s3cache.frame import Frame


def test_variants_of_two_machines_both_stay_readable(machine: Callable[..., Cache]) -> None:
    a, b, c = machine("a"), machine("b"), machine("c")
    joins = [
        in_thread(partial(cache.save, KEY, entry(variant=variant)))
        for cache, variant in ((a, "va"), (b, "vb"))
    ]
    assert all(isinstance(join(), Saved) for join in joins)
    assert a.flush(20).complete
    assert b.flush(20).complete
    for variant in ("va", "vb"):
        found = c.lookup(KEY, variant_is(variant))
        assert isinstance(found, Hit)
        assert found.entry.header.variant == variant


def test_entries_that_the_caller_does_not_accept_are_guard_misses(
    machine: Callable[..., Cache],
) -> None:
    a, b = machine("a"), machine("b")
    for variant in ("v1", "v2"):
        a.save(KEY, entry(variant=variant))
    assert a.flush(20).complete
    seen: list[str] = []

    def refuse(found: Frame) -> bool:
        seen.append(found.header.variant)
        return False

    assert miss(b.lookup(KEY, refuse)) == Reason.GUARD
    assert sorted(seen) == ["v1", "v2"]  # each once
    assert miss(b.lookup(KEY, refuse)) == Reason.GUARD
    assert sorted(seen) == ["v1", "v1", "v2", "v2"]
    assert b.stats().downloaded == 2  # the second time they were here


def test_local_variants_are_asked_before_the_remote(machine: Callable[..., Cache]) -> None:
    cache = machine()
    for variant in ("", "v1", "v2"):
        cache.save(KEY, entry(variant=variant, payload=variant.encode()))
    for variant in ("", "v1", "v2"):
        assert hit(cache.lookup(KEY, variant_is(variant)), "local") == variant.encode()


def test_recache_looks_nothing_up_and_overwrites(
    machine: Callable[..., Cache], memory: MemoryStore
) -> None:
    a = machine("a")
    for variant in ("v1", "v2"):
        a.save(KEY, entry(variant=variant, payload=b"old"))
    assert a.flush(20).complete
    b = machine("b", recache=True)
    assert miss(b.lookup(KEY)) == Reason.FORCED
    b.save(KEY, entry(variant="v2", payload=b"new"))
    assert b.flush(20).complete
    c = machine("c")
    assert hit(c.lookup(KEY, variant_is("v1")), "remote") == b"old"
    assert hit(c.lookup(KEY, variant_is("v2")), "remote") == b"new"
