"""Python code that a test runs in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.support.waiting import LONG_S

# The start of every script: a cache over a directory that other processes share, or a store that
# never answers.
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


def run_script(code: str, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with :data:`PRELUDE` and ``sys.argv[1:]``."""
    done = subprocess.run(
        # -W: Pythons from 3.12 on warn of any fork of a process with threads
        [sys.executable, "-W", "ignore", "-c", PRELUDE + textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done
