"""Helion's configurations that were found by measuring.

``enable()`` names :class:`Backend` in ``HELION_REMOTE_CACHE_BACKEND`` when Helion is imported, with
``HELION_AUTOTUNE_CACHE=RemoteAutotuneCache``, unless a program has set either of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from helion.autotuner.remote_cache import RemoteCacheBackend

from s3cache.ports._files import Files, device_here

_FILE = "best_config"

_files = Files("helion", newest=True)


class Backend(RemoteCacheBackend):  # type: ignore[misc]
    """Helion's interface to the cache; the newest configuration under a key counts."""

    def get(self, key: str) -> str | None:
        """Return the JSON that was put, or ``None``."""
        found = _files.get(_key_of(key))
        return None if found is None or _FILE not in found else found[_FILE].decode()

    def put(self, key: str, data: str) -> None:
        """Keep JSON, to be uploaded."""
        _files.put(_key_of(key), key, {_FILE: data.encode()})

    def list(self, max_results: int | None = None) -> Iterable[str]:
        """Return nothing: a search begins with no other kernel's configurations."""
        return ()


def _key_of(key: str) -> str:
    return _files.key(device_here() or "", key)
