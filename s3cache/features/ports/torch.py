"""Back torch's own remote caches that s3cache does not replace: measurements and size profiles.

torch asks them if its options say so (``autotune_remote_cache``, ``bundled_autotune_remote_cache``,
``automatic_dynamic_remote_pgo``), and keeps them in Redis. Here they are entries, unless variables
name a server of Redis: each cache is of a class of torch's, which has a place for another backend.

torch's keys for what was measured do not hold the device or its driver: ours do.
"""

from __future__ import annotations

import contextlib
import os
import platform
from typing import Any

from s3cache.entries import LabelledKey
from s3cache.features.ports import names
from s3cache.features.ports.files import Files, device_here
from s3cache.torch_api import installed_version

_REDIS = "TORCHINDUCTOR_REDIS_URL", "TORCHINDUCTOR_REDIS_HOST"
_FILE = "value"


def install_backends(undo: contextlib.ExitStack) -> None:
    """Set the backend of each cache class that has none."""
    if any(map(os.environ.get, _REDIS)):
        return
    for caches, measured in ((names.measured_caches, True), (names.profile_caches, False)):
        backend = _backend(measured=measured)
        for each in caches:
            cache = each.get()
            if cache.backend_override_cls is None:
                cache.backend_override_cls = backend
                undo.callback(setattr, cache, "backend_override_cls", None)


def _backend(*, measured: bool) -> type[Any]:
    # A profile grows while a program runs, so the newest one is the largest.
    files = Files("torch", newest=not measured)
    variants: dict[str, str] = {}

    def key_of(key: str) -> LabelledKey | None:
        device = device_here() if measured else platform.python_version()
        if not device:
            return None
        return files.key(torch=installed_version(), needs=device, key=key)

    class Backend(names.remote_cache_backend.get()):  # type: ignore[misc]
        def _get(self, key: str) -> bytes | None:
            content = files.get(own_key) if (own_key := key_of(key)) else None
            return None if content is None else content.get(_FILE)

        def _put(self, key: str, data: bytes) -> None:
            if own_key := key_of(key):
                variant = files.put(own_key, key, {_FILE: data}, instead_of=variants.get(own_key))
                if variant is not None:
                    variants[own_key] = variant

    return Backend
