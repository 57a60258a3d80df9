"""Run Python code of a test in a new process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

from tests.support.waiting import LONG_S

# The start of every script: helpers to open a cache, and a store that never answers.
PRELUDE = """
import asyncio, os, signal, sys, threading, time
from s3cache.cache import Cache, Hit, Miss, Saved
from s3cache.store import FileStore, MemoryStore
from s3cache.tier import background, before_exit
from tests.support.caching import *
from tests.support.stores import *
from tests.support.waiting import eventually, in_thread, join_child as join

class Hanging(MemoryStore):
    async def get(self, *_): await asyncio.Event().wait()
    async def put(self, *args, **more): await asyncio.Event().wait()
"""


def python(
    *arguments: str, timeout_s: float = LONG_S, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, whether it succeeds or fails."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, **how
    )


def run_script(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process, after :data:`PRELUDE`, with ``args`` in ``sys.argv``."""
    # -W: from 3.12, Python warns about any fork of a process with threads
    done = python("-W", "ignore", "-c", PRELUDE + textwrap.dedent(code), *map(str, args))
    assert done.returncode == 0, done.stderr
    return done


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a new process has imported after it ran ``code``."""
    done = python("-c", f"import sys; {code}; print(*sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")
    return {name.partition(".")[0] for name in done.stdout.split()}
