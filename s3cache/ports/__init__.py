"""The caches of other compilers, over the same tiers: local first, verified, uploaded later.

Each adapter is imported and installed when its compiler is imported. Compilers that are not
installed are not waited for. Programs may name the modules ``triton``, ``helion`` and
``torchtitan``; torch uses ``_torch`` if its own options ask for remote caches. ``_files`` describes
the entries of all of them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

from s3cache.util.importing import before_import, when_imported
from s3cache.util.logs import logger_of

logger = logger_of("storage")

#: The module of Triton that decides which class keeps its files.
TRITON = "triton.runtime.cache"
_TORCH, _HELION = "torch._inductor.remote_cache", "helion"
_BACKEND, _CACHE = "HELION_REMOTE_CACHE_BACKEND", "HELION_AUTOTUNE_CACHE"


def install(wants: Callable[[str], bool]) -> Callable[[], None]:
    """Install each wanted adapter when its compiler is imported; return a function to undo it."""
    undo = contextlib.ExitStack()
    if wants("triton") and _is_installed("triton"):
        undo.callback(install_triton())
    if wants("torch"):
        undo.callback(when_imported(_TORCH, lambda: _install_torch(undo)))
    if wants("helion") and _is_installed(_HELION):
        undo.callback(before_import(_HELION, lambda: _name_backend(undo)))
    return undo.close


def _is_installed(package: str) -> bool:
    return package in sys.modules or find_spec(package) is not None


def install_triton() -> Callable[[], None]:
    """Share Triton's files once it is imported; return a function to undo it.

    A cache manager that the program has set stays.
    """
    undo = contextlib.ExitStack()

    def begin() -> None:
        try:
            from s3cache.ports.triton import CacheManager, knobs

            if knobs.cache.manager_class is None:
                knobs.cache.manager_class = CacheManager
                undo.callback(delattr, knobs.cache, "manager_class")
        except Exception as exc:  # noqa: BLE001 - an unknown Triton keeps its own files
            logger.warning("Triton's files are not shared: %s", exc)

    undo.callback(when_imported(TRITON, begin))
    return undo.close


def _install_torch(undo: contextlib.ExitStack) -> None:
    try:
        from s3cache.ports._torch import install_backends

        install_backends(undo)
    except Exception as exc:  # noqa: BLE001 - an unknown torch
        from s3cache.torch_api.names import PORTS

        logger.warning("%s is off: %s", PORTS, exc)


def _name_backend(undo: contextlib.ExitStack) -> None:
    """Set the environment variables that name our backend, unless the program has set them."""
    if os.environ.get(_BACKEND) or os.environ.get(_CACHE):
        return
    os.environ[_BACKEND], os.environ[_CACHE] = "s3cache.ports.helion.Backend", "RemoteAutotuneCache"
    for name in (_BACKEND, _CACHE):
        undo.callback(os.environ.pop, name, None)
