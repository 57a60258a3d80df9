"""Threads for what blocks. Apart, because it cannot be imported once the interpreter exits."""

from __future__ import annotations

import concurrent.futures.thread

__all__ = ["Workers", "abandon"]


class Workers(concurrent.futures.ThreadPoolExecutor):
    """Threads for files and name lookups, which still serve when no more can be started.

    From Python 3.12 none can once the interpreter exits, which is when the last uploads are waited
    for. What comes then waits for a thread that is there; the loop starts the first one early.
    """

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not getattr(self, "_threads", ()):
                raise


def abandon(workers: Workers) -> None:
    """Have the interpreter exit without waiting for these threads.

    One may hang in a name lookup or on a dead mount. They are daemons, as is the thread that
    started them, but concurrent.futures joins what is in this private table all the same.
    """
    queues = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in getattr(workers, "_threads", ()):
        queues.pop(thread, None)
