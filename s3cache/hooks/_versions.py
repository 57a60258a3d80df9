"""Which torch versions the seams were tried with, and where they differ."""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["NEWEST", "OLDEST", "key_prefix", "supported"]

OLDEST = (2, 13)
NEWEST = (2, 13)

logger = logging.getLogger("s3cache")


_warned = False


def supported() -> bool:
    """Whether the installed torch is one of them; if not, one warning says so."""
    global _warned
    installed = _installed()
    found = re.match(r"(\d+)\.(\d+)", installed)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if OLDEST <= release <= NEWEST:
        return True
    if not _warned:
        logger.warning(
            "s3cache: torch %s is not supported (%d.%d to %d.%d are); it compiles without a cache",
            installed,
            *OLDEST,
            *NEWEST,
        )
        _warned = True
    return False


def _installed() -> str:
    """torch's version, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "(none)"


def key_prefix(autograd_cache: Any) -> str:
    """What torch writes before the digest in the name of a key; a constant since 2.13."""
    return str(getattr(autograd_cache, "AOTAUTOGRAD_CACHE_PREFIX", "a"))
