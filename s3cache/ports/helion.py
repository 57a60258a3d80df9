"""Helion's configurations that were found by measuring.

``enable()`` names :class:`Backend` in ``HELION_REMOTE_CACHE_BACKEND`` when Helion is imported, with
``HELION_AUTOTUNE_CACHE=RemoteAutotuneCache``, unless a program has set either of them.

What was put is also a variant under one key for each device and version of Helion: a search that
begins with what was found before lists those. It measures each one that it takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from helion.autotuner.remote_cache import RemoteCacheBackend

from s3cache.ports._files import Files, device_here

_FILE = "best_config"
_LISTED = 100  # where Helion names no limit

_files = Files("helion", newest=True)


class Backend(RemoteCacheBackend):  # type: ignore[misc]
    """Helion's interface to the cache; the newest configuration under a key counts."""

    def get(self, key: str) -> str | None:
        """Return the JSON that was put, or ``None``."""
        found = _files.get(_key_of(key))
        return None if found is None or _FILE not in found else found[_FILE].decode()

    def put(self, key: str, data: str) -> None:
        """Keep JSON, to be uploaded."""
        for where in _key_of(key), _key_of_list():
            _files.put(where, key, {_FILE: data.encode()})

    def list(self, max_results: int | None = None) -> Iterable[str]:
        """Return what was put last for this device by any machine, of any kernel."""
        limit = _LISTED if max_results is None else max_results
        found = _files.newest(_key_of_list(), limit)
        return [files[_FILE].decode() for files in found if _FILE in files]


def _key_of_list() -> str:
    return _files.key("list", device_here() or "", version("helion"))


def _key_of(key: str) -> str:
    return _files.key(device_here() or "", key)
