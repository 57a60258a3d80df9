"""Which entries are meant: every condition has to hold."""

from __future__ import annotations

import time
from typing import Any

import pytest

from s3cache.errors import CorruptError, UntrustedError
from s3cache.manage import Item, Selection

NOW = time.time()
ABOUT = {
    "kind": "aot",
    "torch": "2.13.0+cpu",
    "tag": "mine",
}
ITEM = Item("v1/000/abcdef.0", 1000, NOW - 86400, ABOUT)
DAMAGED = Item("v1/000/abcdef.0", 1000, NOW - 86400, problem=CorruptError("frame", "is damaged"))
STRANGER = Item("v1/000/ab.0", 10, NOW, problem=UntrustedError("unsigned", "no signature"))


@pytest.mark.parametrize(
    ("words", "yes"),
    [
        ({"key": ("bcd", "abcdef")}, True),
        ({"key": ("bcd",)}, False),
        ({"older": 2 * 86400}, False),
        ({"min_size": 1000}, True),
        ({"min_size": 1001}, False),
        ({"kind": ("fx", "shapes")}, False),
        ({"torch": ("2.13",)}, True),
        ({"torch": ("2.13.0+cpu",)}, True),
        ({"torch": ("2.1",)}, False),
        ({"torch": ("2.13.1",)}, False),
        ({"tag": ("",)}, False),
        ({"unreadable": True}, False),
        ({"untrusted": True}, False),
        ({"kind": ("aot",), "older": 2 * 86400}, False),
    ],
)
def test_each_condition(words: dict[str, Any], yes: bool) -> None:
    assert Selection(**words).chooses(ITEM) is yes


@pytest.mark.parametrize(
    ("words", "damaged", "stranger"),
    [
        ({}, True, True),
        ({"unreadable": True}, True, False),
        ({"untrusted": True}, False, True),
        ({"unreadable": True, "untrusted": True}, True, True),
        ({"unreadable": True, "key": ("x",)}, False, False),
        ({"kind": ("aot",)}, False, False),
        ({"torch": ("",)}, False, False),
    ],
)
def test_an_unreadable_entry_matches_no_condition_on_headers(
    words: dict[str, Any], damaged: bool, stranger: bool
) -> None:
    """So that a damaged entry is not removed as one of an old torch."""
    assert Selection(**words).chooses(DAMAGED) is damaged
    assert Selection(**words).chooses(STRANGER) is stranger


@pytest.mark.parametrize(
    "words", [{"kind": ("aot",)}, {"torch": ("2",)}, {"tag": ("",)}, {"untrusted": True}]
)
def test_headers_are_needed_only_where_something_is_chosen_by_them(words: dict[str, Any]) -> None:
    assert not Selection(key=("a",), older=1.0, min_size=3).needs_headers
    assert Selection(**words).needs_headers
