"""Which cache is meant where nobody says: the one that torch.compile was given last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from s3cache.cache import Cache
    from s3cache.stats import CacheStats

__all__ = ["announce", "latest_counts", "with_each"]

_latest: Cache | None = None
_waiting: list[Callable[[Cache], None]] = []


def announce(cache: Cache) -> None:
    """From now on ``cache`` is meant; whoever enables one says so."""
    global _latest
    _latest = cache
    for act in [*_waiting]:
        act(cache)


def with_each(act: Callable[[Cache], None]) -> Callable[[], None]:
    """Have ``act`` called with the cache that was enabled last, and with each one from now on.

    Returns:
        A function that ends this.
    """
    if _latest is not None:
        act(_latest)
    _waiting.append(act)
    return lambda: _waiting.remove(act)


def latest_counts() -> CacheStats | None:
    """The counts of the cache that was enabled last, also where it is off again."""
    return None if _latest is None else _latest.stats()
