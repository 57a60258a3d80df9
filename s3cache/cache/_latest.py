"""The cache that torch.compile was given last, which is meant where none is named."""

from __future__ import annotations

from collections.abc import Callable

from s3cache.cache._cache import Cache, Engine
from s3cache.records import Run

__all__ = ["announce", "latest", "recorded", "with_each"]

_latest: Cache | None = None
_waiting: list[Callable[[Cache], None]] = []


def announce(cache: Cache) -> None:
    """Make ``cache`` the latest one, and call the functions that wait for one."""
    global _latest
    _latest = cache
    for act in [*_waiting]:
        act(cache)


def latest() -> Cache | None:
    """Return the cache that was enabled last, even if it is off again: its counts stay."""
    return _latest


def with_each(act: Callable[[Cache], None]) -> Callable[[], None]:
    """Call ``act`` with the cache that was enabled last, and with each one from now on.

    Returns:
        A function that ends this.
    """
    if _latest is not None:
        act(_latest)
    _waiting.append(act)
    return lambda: _waiting.remove(act)


def recorded() -> Run | None:
    """Return the last few hundred lookups of the cache that was enabled last; any thread."""
    if not isinstance(_latest, Engine):
        return None
    return Run(_latest.recorded_run, _latest.recorded())
