"""Make many permanent objects without garbage collections.

Each collection would go through all of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

# A threshold that few blocks reach, and that we recognize as ours. If a program reads it
# meanwhile, in any thread, and sets it again later, there are still collections. gc.disable() would
# not work: if a program calls it meanwhile, we would undo it.
_FAR = 1_000_003
_usual = 0  # the program's threshold, while ours is set
_FEW = 1_000  # Python 3.12 itself freezes 375 objects; a program that does freezes many more


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Avoid garbage collections in a block that makes many permanent objects."""
    global _usual
    threshold = gc.get_threshold()[0]
    if not (0 < threshold < _FAR and gc.isenabled()):  # no collections; or a nested block
        yield
        return
    gc.collect(1)  # do not keep existing garbage with the new objects
    _usual = threshold
    try:
        gc.set_threshold(_FAR)
        yield
    finally:
        try:
            if gc.get_freeze_count() < _FEW:  # else the program has frozen objects
                # To the oldest generation: a collection of the youngest would go through it all.
                gc.freeze()
                gc.unfreeze()
        finally:
            _collect_as_usual()


def _collect_as_usual() -> None:
    if gc.get_threshold()[0] == _FAR:  # else the program has set its own
        gc.set_threshold(_usual)


os.register_at_fork(after_in_child=_collect_as_usual)  # the child may lack the thread in the block
