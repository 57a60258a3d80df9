"""Helpers to read and use a disk tier, and to count its files."""

from __future__ import annotations

from pathlib import Path

from s3cache.stats import Usage
from s3cache.tier import DiskTier

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
