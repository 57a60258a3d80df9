"""The seams at torch's ``AOTAutogradCache.clear()`` and ``FxGraphCache.clear()``.

Who calls one wants what this machine has of that level to be gone: torch empties its directory, and
leaves its remote caches as they are. So here the entries of that level go from the local tier, and
those in the remote stay, where the next compile finds them.
"""

from __future__ import annotations

from collections.abc import Callable

from s3cache._logs import logger_of
from s3cache.cache import Engine
from s3cache.hooks._patching import Patches
from s3cache.torch_api import internals

__all__ = ["Clearing"]

logger = logger_of("storage")


class Clearing:
    """Has torch's ``clear()`` mean what it says."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def install(self, patches: Patches) -> None:
        """Go along when torch clears its caches."""
        patches.replace(
            internals.clear_autograd_cache, self._clearer("AOT graphs", internals.key_prefix)
        )
        patches.replace(
            internals.clear_fx_cache, self._clearer("FX graphs", lambda: internals.FX_PREFIX)
        )

    def _clearer(
        self, what: str, beginning: Callable[[], str]
    ) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def replacement(original: Callable[[], None]) -> Callable[[], None]:
            def clear() -> None:
                original()
                self._clear(what, beginning())

            return clear

        return replacement

    def _clear(self, what: str, beginning: str) -> None:
        try:
            count = self._engine.clear_local(beginning)
        except Exception:
            if self._engine.settings.strict:
                raise
            logger.warning("%s were not removed from the local tier", what, exc_info=True)
            return
        logger.info(
            "%d %s removed from the local tier; a remote keeps them: Cache.clear() "
            "removes them there, and recache=True compiles anew",
            count,
            what,
        )
