"""A process that saves and looks up entries as fast as it can until it is killed.

It takes the configuration and the steps of ``tests.support.worker``, and more steps. Their lines:
``saved KEY MS`` (durable and acknowledged), ``refused KEY MS``, ``hit KEY MS`` (equal to the last
byte), ``WRONG KEY MS`` and ``miss KEY MS REASON``.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time

from s3cache import Cache
from s3cache.cache import Hit, Saved
from tests.support.worker import Worker, entry, run, say


def size_of(key: str) -> int:
    """Return the size of the entry under ``key``, which is the same in each process."""
    sizes = [200, 1_000, 3_000, 8_000, 8_000, 30_000, 120_000 if key[-1] == "7" else 500]
    return random.Random(key).choice(sizes)


class Soaking(Worker):
    def mix(self, name: str, names: list[str], seed: int) -> None:
        """Save and look up entries until a signal ends the process."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        draw, saved = random.Random(seed), 0
        while True:
            drawn = draw.random()
            if drawn < 0.15:  # a new key, or an old one after a restart
                saved += 1
                self._save(f"{name}-{saved}")
            elif drawn < 0.3:
                self._save(f"{name}-{draw.randrange(saved + 1)}")
            else:
                # Other processes are about as fast: most of these keys are saved, some are not.
                self.look_up([f"{draw.choice(names)}-{draw.randrange(saved + 2)}"])

    def _save(self, key: str) -> None:
        data = entry(key, size_of(key))
        began = time.monotonic()
        result = self._cache.save(key, data)
        kept = isinstance(result, Saved) and result.durable
        say("saved" if kept else "refused", key, _ms(began))

    def look_up(self, keys: list[str]) -> None:
        for key in keys:
            began = time.monotonic()
            result = self._cache.lookup(key)
            took = _ms(began)
            if not isinstance(result, Hit):
                say("miss", key, took, result.reason)
            else:
                right = bytes(result.entry.data) == entry(key, size_of(key))
                say("hit" if right else "WRONG", key, took)


def _ms(began: float) -> str:
    return f"{1000 * (time.monotonic() - began):.1f}"


if __name__ == "__main__":
    _config = json.loads(sys.argv[1])
    with Cache.open(**_config["options"]) as _cache:
        run(Soaking(_cache), _config["steps"])
