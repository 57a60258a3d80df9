"""Run an action between two file system calls that a test chooses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

CALLS = (
    "open", "close", "read", "pread", "write", "pwrite", "replace", "link", "unlink", "mkdir",
    "rmdir", "stat", "lstat", "fstat", "utime", "scandir", "listdir", "fsync", "fdatasync",
)  # fmt: skip


@dataclass
class Calls:
    made: int = 0
    acting: bool = False


@contextlib.contextmanager
def before_call(number: int, action: Callable[[], object]) -> Iterator[Calls]:
    """Run ``action`` before the ``number``-th file system call of the block (from 1)."""
    calls = Calls()

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not calls.acting:
                calls.made += 1
                if calls.made == number:
                    calls.acting = True
                    action()
                    calls.acting = False
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            if hasattr(os, name):
                stack.enter_context(mock.patch.object(os, name, watched(getattr(os, name))))
        yield calls
