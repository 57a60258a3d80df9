"""Locked descriptors that a forked child must let go of.

A ``flock`` belongs to the open file, which a forked child shares: as long as the child keeps its
copy open, the lock outlives the parent that took it, and everybody else waits for the child.
"""

from __future__ import annotations

import os

__all__ = ["close_in_children", "closed"]

_descriptors: set[int] = set()


def close_in_children(fd: int) -> int:
    """Have every child forked from now on close ``fd`` at once; returns ``fd``."""
    _descriptors.add(fd)
    return fd


def closed(fd: int) -> None:
    """Close ``fd`` here and forget it."""
    _descriptors.discard(fd)
    os.close(fd)


def _after_fork_in_child() -> None:
    for fd in _descriptors:
        os.close(fd)
    _descriptors.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
