"""A process that uses a cache and reports each step in a line; the tests kill it.

``python -m tests.support.worker JSON`` runs with ``{"options": ..., "steps": [[verb, ...], ...]}``,
where the options are those of ``Cache.open``. Lines are not buffered: a line that a test has read
reports a step that was done before the process died:

=============================== ====================================================
``saved KEY``                   ``save`` returned: durable and acknowledged
``hit KEY TIER``                found, with exactly the bytes that were saved
``WRONG KEY``                   found, but with other bytes
``miss KEY REASON``
``flushed REMAINING``
``upload STEP NAME``            a transfer event, with ``"events": true``
``at WORD``                     the step ``say``
=============================== ====================================================
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from typing import Any

from s3cache import Cache, frame
from s3cache.cache import Hit, Saved


def key(name: str) -> str:
    return f"key-{name}"


def keys(start: int, count: int, name: str = "") -> list[str]:
    return [key(f"{name}{number:04}") for number in range(start, start + count)]


def entry(key: str, size: int) -> bytes:
    """Return the frame that each process saves under ``key``: it does not depend on the process."""
    noise = random.Random(key).randbytes(size)
    half = size // 2
    return frame.encode(
        kind="fault-test",
        key=key,
        sections={"code": noise[:half], "data": noise[half:]},
        meta={"size": size},
        codec="none",
        created_ns=1_700_000_000_000_000_000,
    )


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Worker:
    """Each method without an underscore is a step."""

    def __init__(self, cache: Cache, *, events: bool = False) -> None:
        self._cache = cache
        if events:
            cache.subscribe(lambda event: say(event.direction, event.step, event.name))

    def save(self, keys: list[str], size: int) -> None:
        for key in keys:
            result = self._cache.save(key, entry(key, size))
            assert isinstance(result, Saved), result
            assert result.durable
            say("saved", key)

    def save_for_ever(self, key: str, size: int) -> None:
        """Save the same entry again and again."""
        data = entry(key, size)
        while True:
            assert isinstance(self._cache.save(key, data), Saved)
            say("saved", key)

    def check(self, keys: list[str]) -> None:
        """Look every entry up, and compare each byte."""
        for key in keys:
            result = self._cache.lookup(key)
            if not isinstance(result, Hit):
                say("miss", key, result.reason)
                continue
            size = result.entry.header.meta["size"]
            assert isinstance(size, int)
            if bytes(result.entry.data) == entry(key, size):
                say("hit", key, result.tier)
            else:
                say("WRONG", key)

    def flush(self, timeout_s: float | None = None) -> None:
        say("flushed", self._cache.flush(timeout_s).remaining)

    def say(self, word: str) -> None:
        say("at", word)

    def hear(self) -> None:
        """Wait until the test writes a line."""
        sys.stdin.readline()

    def work(self) -> None:
        """Run until a signal ends the process, as a program that trains does.

        :meth:`hear` would not do: Python does not notice a signal that comes between its last
        instruction and a system call that then blocks.
        """
        while True:
            time.sleep(0.01)

    def until_imported(self, module: str) -> None:
        """Wait until the background thread, which makes a client, has imported ``module``."""
        while module not in sys.modules:
            time.sleep(0.0005)

    def exit_on_sigterm(self) -> None:
        """Exit on SIGTERM, as programs do that shut down cleanly."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))

    def fork(self, steps: list[list[Any]], leave: str = "_exit") -> None:
        """Run ``steps`` in a child, with the inherited cache, and wait for it."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                run(self, steps)
                status = 0
            finally:
                if leave == "_exit":
                    os._exit(status)
            sys.exit(status)
        _, status = os.waitpid(child, 0)
        say("child", os.waitstatus_to_exitcode(status))

    def processes(self, method: str, steps_of_each: list[list[list[Any]]]) -> None:
        """Run steps in children of multiprocessing, as a DataLoader does."""
        context: Any = multiprocessing.get_context(method)
        children = [
            context.Process(target=_child, args=(self if method == "fork" else None, steps))
            for steps in steps_of_each
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
            say("child", child.exitcode)


def run(worker: Worker, steps: list[list[Any]]) -> None:
    for verb, *arguments in steps:
        assert not verb.startswith("_")
        getattr(worker, verb)(*arguments)


def _child(inherited: Worker | None, steps: list[list[Any]]) -> None:
    run(inherited or _open(json.loads(sys.argv[1])), steps)


def _open(config: dict[str, Any]) -> Worker:
    return Worker(Cache.open(**config["options"]), events=config.get("events", False))


if __name__ == "__main__":
    _config = json.loads(sys.argv[1])
    run(_open(_config), _config["steps"])
