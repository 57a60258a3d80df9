"""A process that saves and looks up entries as fast as it can until it is killed, with a log.

``python -m tests.soak.worker JSON`` with ``{"options": ..., "log": path, "name": ..., "names": all
names, "seed": ..., "steps": [...]}``. Each line of the log is written in one call: ``saved KEY MS``
(durable and acknowledged), ``refused KEY MS``, ``hit KEY MS`` (equal to the last byte), ``WRONG KEY
MS``, ``miss KEY MS REASON``, and ``left COUNT`` after a flush.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

from s3cache import Cache
from s3cache.cache import Hit, Saved
from tests.support.worker import entry


def size_of(key: str) -> int:
    """Return the size of the entry under ``key``, which is the same in each process."""
    sizes = [200, 1_000, 3_000, 8_000, 8_000, 30_000, 120_000 if key[-1] == "7" else 500]
    return random.Random(key).choice(sizes)


class Worker:
    """Methods without an underscore are steps."""

    def __init__(self, cache: Cache, config: dict[str, Any]) -> None:
        self._cache = cache
        self._log = os.open(config["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._name: str = config["name"]
        self._names: list[str] = config["names"]
        self._random = random.Random(config["seed"])
        self._saved = 0

    def _log_line(self, *words: object) -> None:
        os.write(self._log, (" ".join(map(str, words)) + "\n").encode())

    def mix(self) -> None:
        """Save and look up entries until a signal ends the process."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        while True:
            drawn = self._random.random()
            if drawn < 0.15:  # a new key, or an old one after a restart
                self._saved += 1
                self._save(f"{self._name}-{self._saved}")
            elif drawn < 0.3:
                self._save(f"{self._name}-{self._random.randrange(self._saved + 1)}")
            else:
                # Other processes are about as fast: most of these keys are saved, some are not.
                other = self._random.choice(self._names)
                self.check([f"{other}-{self._random.randrange(self._saved + 2)}"])

    def _save(self, key: str) -> None:
        data = entry(key, size_of(key))
        began = time.monotonic()
        result = self._cache.save(key, data)
        kept = isinstance(result, Saved) and result.durable
        self._log_line("saved" if kept else "refused", key, _ms(began))

    def check(self, keys: list[str]) -> None:
        for key in keys:
            began = time.monotonic()
            result = self._cache.lookup(key)
            took = _ms(began)
            if not isinstance(result, Hit):
                self._log_line("miss", key, took, result.reason)
            else:
                right = bytes(result.entry.data) == entry(key, size_of(key))
                self._log_line("hit" if right else "WRONG", key, took)

    def flush(self, timeout_s: float) -> None:
        self._log_line("left", self._cache.flush(timeout_s).remaining)


def _ms(began: float) -> str:
    return f"{1000 * (time.monotonic() - began):.1f}"


if __name__ == "__main__":
    _config = json.loads(sys.argv[1])
    with Cache.open(**_config["options"]) as _cache:
        _worker = Worker(_cache, _config)
        for _verb, *_arguments in _config["steps"]:
            getattr(_worker, _verb)(*_arguments)
