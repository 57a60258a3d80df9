"""What s3cache does among torch's own events of a compile.

They are in the log that ``TORCH_TRACE`` asks for, which tlparse shows, and in what
``torch.profiler`` records.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from s3cache.torch_api import internals

__all__ = ["shown"]


@contextlib.contextmanager
def shown(name: str) -> Iterator[dict[str, object]]:
    """Show the block as an event ``name``, with what the block puts into the mapping it gets."""
    about: dict[str, object] = {}
    end = None
    # Nothing that torch meets when it writes a trace is to end anybody's training.
    with contextlib.suppress(Exception):
        end = internals.begin_event(name, time.time_ns())
    try:
        yield about
    finally:
        if end is not None:
            with contextlib.suppress(Exception):
                end(time.time_ns(), about)
