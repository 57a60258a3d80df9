"""Wait for other threads and processes, with a time limit: a test that hangs reports nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from s3cache.tier import BackgroundLoop

# Longer than anything takes on a busy machine; only a failing test waits this long.
LONG_S = 200.0


def eventually(condition: Callable[[], object], within_s: float = LONG_S) -> None:
    """Wait until ``condition`` holds; fail after ``within_s``."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(0.002)


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start ``work`` on a thread; return a function that waits for its result or error."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()

    def join() -> Any:
        thread.join(LONG_S)
        assert not thread.is_alive(), "the thread hangs"
        if errors:
            raise errors[0]
        return results[0]

    return join


def join_child(child: int) -> int | str:
    """Return the exit status of a forked child, negative for a signal, or ``"hangs"``."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tasks_on(loop: BackgroundLoop) -> int:
    """Return the number of tasks on ``loop``, except the one that counts them."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return loop.wait(count(), LONG_S)
