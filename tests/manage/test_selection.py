"""Which entries are meant: every condition has to hold."""

from __future__ import annotations

from typing import Any

import pytest

from s3cache.errors import CorruptError, UntrustedError
from s3cache.manage import HeaderSummary, Item, Selection

NOW = 1_000_000.0
ABOUT = HeaderSummary(
    "aot", "", 2, NOW, "s3cache/1", "2.13.0+cpu", "mine", ("ci", "other"), ("cpu", "cuda")
)
ITEM = Item("v1/000/abcdef.0", 1000, NOW - 3600, ABOUT)
DAMAGED = Item("v1/000/abcdef.0", 1000, NOW - 3600, problem=CorruptError("frame", "is damaged"))
STRANGER = Item("v1/000/ab.0", 10, NOW, problem=UntrustedError("unsigned", "no signature"))


def selection(**words: Any) -> Selection:
    return Selection(now=lambda: NOW, **words)


@pytest.mark.parametrize(
    ("words", "yes"),
    [
        ({}, True),
        ({"keys": ("abc",)}, True),
        ({"keys": ("bcd", "abcdef")}, True),
        ({"keys": ("bcd",)}, False),
        ({"older_s": 3600}, True),
        ({"older_s": 3601}, False),
        ({"newer_s": 3601}, True),
        ({"newer_s": 3600}, False),
        ({"min_bytes": 1000}, True),
        ({"min_bytes": 1001}, False),
        ({"max_bytes": 1000}, True),
        ({"max_bytes": 999}, False),
        ({"kinds": ("aot",)}, True),
        ({"kinds": ("fx", "shapes")}, False),
        ({"torch": ("2.13",)}, True),
        ({"torch": ("2.13.0",)}, True),
        ({"torch": ("2.13.0+cpu",)}, True),
        ({"torch": ("2.1",)}, False),
        ({"torch": ("2.13.1",)}, False),
        ({"tags": ("mine",)}, True),
        ({"tags": ("",)}, False),
        ({"signers": ("other",)}, True),
        ({"signers": ("absent",)}, False),
        ({"devices": ("xpu", "cuda")}, True),
        ({"devices": ("mps",)}, False),
        ({"but_keys": frozenset({"other"})}, True),
        ({"but_keys": frozenset({"abcdef"})}, False),
        ({"unreadable": True}, False),
        ({"untrusted": True}, False),
        ({"kinds": ("aot",), "older_s": 9999}, False),
    ],
)
def test_each_condition(words: dict[str, Any], yes: bool) -> None:
    assert selection(**words).chooses(ITEM) is yes


@pytest.mark.parametrize(
    ("words", "damaged", "stranger"),
    [
        ({}, True, True),
        ({"unreadable": True}, True, False),
        ({"untrusted": True}, False, True),
        ({"unreadable": True, "untrusted": True}, True, True),
        ({"unreadable": True, "keys": ("x",)}, False, False),
        ({"kinds": ("aot",)}, False, False),
        ({"torch": ("",)}, False, False),
    ],
)
def test_an_unreadable_entry_matches_no_condition_on_headers(
    words: dict[str, Any], damaged: bool, stranger: bool
) -> None:
    """So that a damaged entry is not removed as one of an old torch."""
    assert selection(**words).chooses(DAMAGED) is damaged
    assert selection(**words).chooses(STRANGER) is stranger


def test_headers_are_needed_only_where_something_is_chosen_by_them() -> None:
    assert not selection().needs_heads
    assert not selection(keys=("a",), older_s=1.0, newer_s=9.0, max_bytes=3).needs_heads
    assert selection(kinds=("aot",)).needs_heads
    assert selection(torch=("2",)).needs_heads
    assert selection(tags=("",)).needs_heads
    assert selection(untrusted=True).needs_heads
    assert selection().is_everything
    assert not selection(keys=("a",)).is_everything
