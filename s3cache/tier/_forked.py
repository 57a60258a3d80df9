"""Locked files that a forked child must let go of.

A ``flock`` belongs to the open file, which a forked child shares: as long as the child keeps its
copy open, the lock outlives the parent that took it, and everybody else waits for the child.
"""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["close_unshared", "open_unshared"]

_descriptors: set[int] = set()
# Held by whoever forks: a child must know every descriptor it got. Reentrant, for a signal handler
# may fork.
_mutex = threading.RLock()


def open_unshared(path: str, flags: int) -> int:
    """Open ``path``, a private file; every child forked from now on closes it at once."""
    with _mutex:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        _descriptors.add(fd)
    return fd


def close_unshared(fd: int) -> None:
    """Close what :func:`open_unshared` opened."""
    with _mutex:
        _descriptors.discard(fd)
        os.close(fd)


def _after_fork_in_child() -> None:
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
    _descriptors.clear()
    _mutex.release()


os.register_at_fork(
    before=_mutex.acquire,
    after_in_parent=_mutex.release,
    after_in_child=_after_fork_in_child,
)
