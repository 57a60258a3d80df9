"""Errors say what is wrong in one line, and survive a trip to another process."""

from __future__ import annotations

import pickle

import pytest

from s3cache import errors
from s3cache.errors import ConfigError, CorruptError, StoreError, TruncatedError, UntrustedError

ERRORS = [
    (ConfigError("option x", "is bad", "use y"), "option x: is bad; use y"),
    (CorruptError("header", "is no msgpack"), "header: is no msgpack"),
    (TruncatedError("frame", 3, 48), "frame: ends after 3 bytes, needs at least 48"),
    (UntrustedError("unsigned", "by x"), "an entry is not trusted (unsigned): by x"),
    (StoreError("reset"), "reset"),
    (
        errors.TransientError("reset", op="get", store="s3://b", key="k", attempts=3, elapsed_s=1),
        "get s3://b k: reset (gave up after 3 attempts in 1.0 s)",
    ),
]


@pytest.mark.parametrize(("error", "text"), ERRORS, ids=lambda each: type(each).__name__)
def test_an_error_is_the_same_after_pickling(error: Exception, text: str) -> None:
    assert str(error) == text
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (text, vars(error))


def test_foreign_text_makes_no_line_of_its_own() -> None:
    assert str(StoreError("\x1b[2J\nforged")) == "\\x1b[2J\\nforged"
    assert str(UntrustedError("unsigned", "a\nb")).endswith("a\\nb")
