"""Install each adapter when its compiler is imported.

Compilers that are not installed are not waited for. Programs may name the modules ``triton``,
``helion`` and ``torchtitan``; torch uses ``torch`` if its own options ask for remote caches.
``files`` describes the entries of all of them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from _s3cache_process import TRITON
from s3cache.features.ports import PortOptions
from s3cache.util.importing import before_import, when_imported
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from s3cache.hooks import Session

logger = logger_of("storage")

_TORCH, _HELION = "torch._inductor.remote_cache", "helion"
_BACKEND, _CACHE = "HELION_REMOTE_CACHE_BACKEND", "HELION_AUTOTUNE_CACHE"


def install(session: Session) -> None:
    """Install each wanted adapter when its compiler is imported."""
    wants, undo = session.engine.settings.of(PortOptions).wants_port, contextlib.ExitStack()
    session.undo.callback(undo.close)
    if wants("triton") and _is_installed("triton"):
        undo.callback(install_triton())
    if wants("torch"):
        undo.callback(when_imported(_TORCH, lambda: _install_torch(undo)))
    if wants("helion") and _is_installed(_HELION):
        undo.callback(before_import(_HELION, lambda: _name_backend(undo)))


def share_triton_later() -> Callable[[], None] | None:
    """Let Triton's first kernel enable the cache that the environment names."""
    wanted = os.environ.get("S3CACHE_PORTS") or "auto"
    if wanted != "auto" and "triton" not in wanted.split(","):
        return None
    return install_triton()


def _is_installed(package: str) -> bool:
    return package in sys.modules or find_spec(package) is not None


def install_triton() -> Callable[[], None]:
    """Share Triton's files once it is imported; return a function to undo it.

    A cache manager that the program has set stays.
    """
    undo = contextlib.ExitStack()

    def begin() -> None:
        with _warned("Triton's files are not shared: %s"):
            from s3cache.features.ports.triton import CacheManager, knobs

            if knobs.cache.manager_class is None:
                knobs.cache.manager_class = CacheManager
                undo.callback(delattr, knobs.cache, "manager_class")

    undo.callback(when_imported(TRITON, begin))
    return undo.close


def _install_torch(undo: contextlib.ExitStack) -> None:
    from s3cache.features.ports.names import FEATURE

    with _warned(f"{FEATURE} is off: %s"):
        from s3cache.features.ports.torch import install_backends

        install_backends(undo)


@contextlib.contextmanager
def _warned(message: str) -> Iterator[None]:
    """Warn of an error, of an unknown compiler: it keeps its own files."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001
        logger.warning(message, exc)


def _name_backend(undo: contextlib.ExitStack) -> None:
    """Set the environment variables that name our backend, unless the program has set them."""
    if os.environ.get(_BACKEND) or os.environ.get(_CACHE):
        return
    os.environ[_BACKEND] = f"{__package__}.helion.Backend"
    os.environ[_CACHE] = "RemoteAutotuneCache"
    for name in (_BACKEND, _CACHE):
        undo.callback(os.environ.pop, name, None)
