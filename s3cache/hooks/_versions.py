"""Which torch versions the seams were tried with, and where they differ."""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["NEWEST", "OLDEST", "key_prefix", "loaded", "name_of_key", "supported"]

OLDEST = (2, 11)
NEWEST = (2, 15)

logger = logging.getLogger("s3cache")


_warned = False


def supported() -> bool:
    """Whether the installed torch is one of them; if not, one warning says so."""
    global _warned
    if OLDEST <= _release() <= NEWEST:
        return True
    if not _warned:
        logger.warning(
            "s3cache: torch %s is not supported (%d.%d to %d.%d are); it compiles without a cache",
            _installed(),
            *OLDEST,
            *NEWEST,
        )
        _warned = True
    return False


def _release() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", _installed())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _installed() -> str:
    """torch's version, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "(none)"


def key_prefix(autograd_cache: Any) -> str:
    """What torch writes before the digest in the name of a key; a constant since 2.13."""
    return str(getattr(autograd_cache, "AOTAUTOGRAD_CACHE_PREFIX", "a"))


def name_of_key(module: Any, mod: Any, args: Any, aot_config: Any, others: tuple[Any, ...]) -> str:
    """What ``try_load`` with these arguments would look up; raises what it would raise."""
    if _release() >= (2, 12):
        name, _ = module.autograd_cache_key(mod, args, aot_config, *others[:1])
        return str(name)
    gm = getattr(mod, "gm", mod)
    options = {"cudagraphs": others[0], "boxed_forward_device_index": others[1]}
    with module.sanitize_gm_for_cache(gm):
        name, _ = module.autograd_cache_key(gm, args, aot_config, options)
    return str(name)


def loaded(function: Any, aot_config: Any) -> Any:
    """What ``try_load`` returns for a hit: with the configuration since 2.13."""
    return (function, aot_config) if _release() >= (2, 13) else function
