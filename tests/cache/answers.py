"""Short forms of a cache's results, its remote calls and its local files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from s3cache import entries
from s3cache.cache import Cache, Hit, Miss
from s3cache.frame import Frame
from s3cache.stats import Reason
from tests.support.caching import KEY, payload

FIRST = entries.first_name(KEY)
#: Opens the cache of a machine, named by its local directory; all machines share one remote.
Machines = Callable[..., Cache]


def variant_is(*wanted: str) -> Callable[[Frame], bool]:
    return lambda found: found.header.variant in wanted


def miss(result: object) -> Reason:
    assert isinstance(result, Miss), result
    return result.reason


def hit(result: object, tier: str) -> bytes:
    assert isinstance(result, Hit), result
    assert result.tier == tier
    return payload(result.entry)


def calls(cache: Cache) -> dict[str, int]:
    return {verb: stats.calls for verb, stats in cache.stats().remote.items() if stats.calls}


def local_files(tmp_path: Path, machine: str = "a") -> list[Path]:
    return [path for path in (tmp_path / machine / "objects").rglob("*") if path.is_file()]
