"""The seam at AOTAutograd's key: what may be cached, and a key of named components."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from s3cache.cache import Cache
from s3cache.graph._key import Component, Key
from s3cache.hooks._compiling import Compiling
from s3cache.hooks._keying import Keying, reasons_of
from s3cache.hooks._patching import Patches
from s3cache.hooks._registry import Registry

__all__ = ["KeySeam"]

logger = logging.getLogger("s3cache")

# A key is needed from the lookup that misses until the save, which for a backward graph that is
# compiled late may be many graphs later.
_REMEMBERED_KEYS = 1024


class KeySeam:
    """Digests keys, and remembers their components until they are saved with an entry."""

    def __init__(self, cache: Cache, registry: Registry, compiling: Compiling) -> None:
        self._cache = cache
        self._registry = registry
        self._compiling = compiling
        self._keys: OrderedDict[str, Key] = OrderedDict()
        self._warned = False

    def made(self, key: str) -> bool:
        """Whether ``key`` is one of ours, and neither torch's stand-in nor somebody else's."""
        return key in self._keys

    def components(self, key: str) -> Mapping[str, Component]:
        """What ``key`` is made of."""
        return self._keys[key].components

    def install(self, patches: Patches, module: Any) -> None:
        """Replace what makes a key in torch's ``autograd_cache``."""
        Keying(self._registry, self._remember).install(patches, module)
        self._install_account(patches, module)

    def _remember(self, name: str, key: Key) -> None:
        self._keys[name] = key
        while len(self._keys) > _REMEMBERED_KEYS:
            self._keys.popitem(last=False)

    def _install_account(self, patches: Patches, module: Any) -> None:
        original = module.autograd_cache_key

        def autograd_cache_key(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except Exception as exc:
                self._bypassed(exc)
                raise
            self._compiling.key = result[0]
            return result

        patches.set(module, "autograd_cache_key", autograd_cache_key)

    def _bypassed(self, error: Exception) -> None:
        codes: list[str] = [each.code for each in reasons_of(error)] or ["error"]
        self._cache.count_bypass(codes)
        self._compiling.met(error)
        mistake = codes == ["error"] and not self._warned and not self._cache.settings.strict
        self._warned |= mistake
        logger.log(
            logging.WARNING if mistake else logging.INFO,
            "s3cache: a graph is not cached: %s",
            error,
            exc_info=error if mistake else None,
        )
