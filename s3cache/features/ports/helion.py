"""Share the configurations that Helion's searches find.

When Helion is imported, ``enable()`` sets ``HELION_REMOTE_CACHE_BACKEND`` to :class:`Backend` and
``HELION_AUTOTUNE_CACHE`` to ``RemoteAutotuneCache``, unless the program has set either of them.

Each configuration is saved twice: under its own key, and as a variant under one key per device and
version of Helion. A search may begin with the configurations that it lists there; it measures them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from helion.autotuner.remote_cache import RemoteCacheBackend

from s3cache.entries import LabelledKey
from s3cache.features.ports.files import Files, device_here

_FILE = "best_config"
_LISTED = 100  # if Helion gives no limit

_files = Files("helion", newest=True)


class Backend(RemoteCacheBackend):  # type: ignore[misc]
    """Helion's interface to the cache. The newest configuration under a key is used."""

    def get(self, key: str) -> str | None:
        """Return the JSON under ``key``, or ``None``."""
        found = _files.get(_key_of(key))
        return None if found is None or _FILE not in found else found[_FILE].decode()

    def put(self, key: str, data: str) -> None:
        """Save JSON, to be uploaded."""
        for where in _key_of(key), _key_of_list():
            _files.put(where, key, {_FILE: data.encode()})

    def list(self, max_results: int | None = None) -> Iterable[str]:
        """Return the newest configurations of any kernel that any machine saved for this device."""
        limit = _LISTED if max_results is None else max_results
        found = _files.newest(_key_of_list(), limit)
        return [files[_FILE].decode() for files in found if _FILE in files]


def _key_of_list() -> LabelledKey:
    return _files.key(list="all", device=device_here() or "", helion=version("helion"))


def _key_of(key: str) -> LabelledKey:
    return _files.key(device=device_here() or "", kernel=key)
