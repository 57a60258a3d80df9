"""A process with uploads, the remote that gets them, and helpers to read a disk tier."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3cache.settings import Settings
from s3cache.stats import Listeners, TransferEvent, Usage
from s3cache.store import Buffer
from s3cache.tier import BackgroundLoop, DiskTier, Uploads

MIB = 1 << 20


class Remote:
    """A remote that gets uploads. While it is closed, they wait; ``errors`` are raised in turn."""

    def __init__(self) -> None:
        self.is_open = True
        self.objects: dict[str, bytes] = {}
        self.puts: Counter[str] = Counter()
        self.adopted: dict[str, bool] = {}
        self.errors: dict[str, list[Exception]] = {}
        self.waiting: set[str] = set()
        self.most_waiting = 0

    @staticmethod
    def verify(name: str, data: Buffer, is_adopted: bool) -> tuple[bytes, bool]:
        return bytes(data), is_adopted

    async def publish(self, name: str, verified: tuple[bytes, bool]) -> None:
        self.waiting.add(name)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        try:
            while not self.is_open:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0)
        finally:
            self.waiting.discard(name)
        if errors := self.errors.get(name):
            raise errors.pop(0)
        self.puts[name] += 1
        self.objects[name], self.adopted[name] = verified


class Site:
    """One process: a loop, a tier and uploads from it."""

    def __init__(self, tier: DiskTier | None, remote: Remote, **limits: Any) -> None:
        self.loop = BackgroundLoop()
        self.tier = tier
        self.remote = remote
        self.events: list[TransferEvent] = []
        self.problems: list[Exception] = []
        self.listeners = Listeners()
        self.listeners.subscribe(self.events.append)
        self.uploads = Uploads(
            self.loop,
            Settings(**{"upload_concurrency": 4, **limits}),
            self.listeners,
            tier,
            verify=remote.verify,
            publish=remote.publish,
            on_problem=self.problems.append,
            before_flush=lambda: None,
        )

    def put(self, name: str, data: bytes = b"data") -> None:
        assert self.tier is not None
        self.tier.put_pending(name, data)
        self.uploads.add(name)

    def steps(self, name: str) -> list[str]:
        return [event.step for event in self.events if event.name == name]

    def close(self) -> None:
        self.uploads.close(5)
        if self.tier is not None:
            self.tier.close()
        self.loop.stop()


NewSite = Callable[..., Site]


MANY = 1 << 40


def names(tier: DiskTier) -> list[str]:
    return sorted(info.key for info in tier.objects())


def on_disk(root: Path) -> Usage:
    sizes = [path.stat().st_size for path in (root / "objects").rglob("*") if path.is_file()]
    return Usage(sum(sizes), len(sizes))


def exact(tier: DiskTier) -> bool:
    return tier.usage() == on_disk(Path(tier.root))


def use(tier: DiskTier, verb: str) -> None:
    if verb in ("put", "put_pending"):
        getattr(tier, verb)("new/key", b"x")
    elif verb in ("usage", "adopt", "pending"):
        getattr(tier, verb)()
    else:
        getattr(tier, verb)("old/1")
