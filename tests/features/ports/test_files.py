"""Adapters of other compilers read the newest entries under a key."""

from __future__ import annotations

import pytest

from s3cache.cache import Engine
from s3cache.features.ports.files import Files
from s3cache.trust import generate
from tests.features.ports.conftest import Start

_FILES = Files("helion", newest=True)
_KEY = _FILES.key(list="all")


def put(engine: Engine, contents: str) -> None:
    """Put one entry for each letter, and upload it before the next one."""
    for each in contents:
        _FILES.put(_KEY, each, {"file": each.encode()})
        assert not engine.flush(10).remaining


def newest(limit: int) -> str:
    return "".join(each["file"].decode() for each in _FILES.newest(_KEY, limit))


def requests(engine: Engine) -> int:
    return sum(each.calls for each in engine.stats().remote.values())


def test_the_newest_of_all_machines_come_first(start: Start) -> None:
    one = start("one")
    assert newest(9) == ""
    put(one, "abcde")
    assert newest(9) == "edcba"
    two = start("two")
    put(two, "f")
    assert newest(3) == "fed"
    assert newest(9) == "fedcba"
    start("one")
    assert newest(2) == "fe"


@pytest.mark.parametrize("limit", [0, 1, 2, 10])
def test_a_listing_makes_at_most_two_more_requests_than_entries(start: Start, limit: int) -> None:
    put(start("one"), "abcdefghijklmnopqrst")
    two = start("two")
    assert len(newest(limit)) == limit
    first = requests(two)
    assert first <= (limit and limit + 2)  # one lists
    assert len(newest(limit)) == limit
    assert requests(two) - first <= 3


def test_a_list_of_entries_counts_no_hit_or_miss(start: Start) -> None:
    one = start("one")
    put(one, "a")
    newest(1)
    assert one.stats().kinds["helion"].lookups == 0


def test_untrusted_entries_are_not_listed(start: Start) -> None:
    signer = generate("ci")
    put(start("one"), "a")
    put(start("two", signing_key=signer.secret_text()), "b")
    start("three", trust="require", trusted_keys=signer.public_text())
    assert newest(9) == "b"


def test_a_replaced_variant_that_was_not_uploaded_is_removed(start: Start) -> None:
    """A profile grows while a program runs: only the last one is uploaded."""
    one = start("one")
    first = _FILES.put(_KEY, "a", {"file": b"a"})
    assert _FILES.put(_KEY, "b", {"file": b"b"}, instead_of=first) not in (None, first)
    assert not one.flush(10).remaining
    assert one.stats().uploaded == 1
    start("two")
    assert newest(9) == "b"
