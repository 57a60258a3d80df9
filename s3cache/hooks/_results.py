"""The seam at what was compiled: results that cannot be kept are counted, with the reason."""

from __future__ import annotations

import logging
from typing import Any

from s3cache.cache import Cache
from s3cache.graph._safety import Unsafe, unsafe_result
from s3cache.hooks._compiling import Compiling
from s3cache.hooks._patching import Patches

__all__ = ["ResultSeam"]

logger = logging.getLogger("s3cache")


class ResultSeam:
    """Looks at entries before torch pickles them, and at whether it could."""

    def __init__(self, cache: Cache, compiling: Compiling) -> None:
        self._cache = cache
        self._compiling = compiling

    def install(self, patches: Patches, module: Any) -> None:
        """Replace ``AOTAutogradCache._pickle_entry``."""
        cache_type = module.AOTAutogradCache
        original = cache_type._pickle_entry

        def pickle_entry(entry: Any, *args: Any, **kwargs: Any) -> bytes | None:
            if reasons := unsafe_result(entry):
                raise self._refused(module, reasons)
            content: bytes | None = original(entry, *args, **kwargs)
            if content is None:  # torch has logged what it met
                field = cache_type._find_unpicklable_field(entry)
                self._refused(module, [_not_pickled(field)])
            return content

        patches.set(cache_type, "_pickle_entry", staticmethod(pickle_entry))

    def _refused(self, module: Any, reasons: list[Unsafe]) -> Exception:
        error: Exception = module.BypassAOTAutogradCache("; ".join(map(str, reasons)))
        self._cache.count_bypass([each.code for each in reasons])
        self._compiling.met(error)
        logger.info("s3cache: a compiled graph is not shared: %s", error)
        return error


def _not_pickled(field: str | None) -> Unsafe:
    return Unsafe(
        "entry",
        f"what it was compiled to cannot be pickled ({field or 'as a whole'})",
        "look for torch's warning 'unable to serialize'",
        target=field or "",
    )
