"""Is the program inside ``torch._inductor.utils.fresh_cache()``, which asks for compiling anew?"""

from __future__ import annotations

import os

__all__ = ["FreshCache"]


class FreshCache:
    """Tells a cache directory that is fresh from the one there was when this was made.

    ``fresh_cache()`` leaves no other trace that all of its callers share. It puts Triton's
    directory into Inductor's; a program that merely moves its cache seldom does just that.
    """

    def __init__(self) -> None:
        self._home = os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    def inside(self) -> bool:
        """Whether it is now, whatever the thread."""
        directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        if directory is None or directory == self._home:
            return False
        return os.environ.get("TRITON_CACHE_DIR") == os.path.join(directory, "triton")
