"""Store torchtitan's precompiled graphs: its ``StorageAdapter``, over the cache.

::

    storage = s3cache.features.ports.torchtitan.Storage("llama3-8b")
    precompile_fx_trace_save(..., storage=storage)

torchtitan makes its own ``DiskStorageAdapter`` in its trainer, so a program has to pass this one.
"""

from __future__ import annotations

from s3cache.entries import LabelledKey, name_prefix
from s3cache.errors import StoreError
from s3cache.features.ports.files import Files, running_engine

_FILE = "artifact"

_files = Files("torchtitan", newest=True)


class Storage:
    """Artifacts under the keys of one ``name``, which other programs must not use.

    torchtitan has one key for all programs. It unpickles what it loads: here only what the cache's
    policy trusts.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def save(self, key: str, data: bytes) -> str:
        """Save an artifact in place of an earlier one; return its key, or raise StoreError."""
        where = self._key_of(key)
        if _files.put(where, key, {_FILE: data}, at_once=True) is None:
            raise StoreError("the artifact is not kept", op="save", key=key)
        return where

    def load(self, key: str) -> bytes:
        """Return the newest artifact; raise :class:`FileNotFoundError` if there is none."""
        content = _files.get(self._key_of(key))
        if content is None or _FILE not in content:
            raise FileNotFoundError(f"no artifact of {self._name} is under the key {key!r}")
        return content[_FILE]

    def exists(self, key: str) -> bool:
        """Return whether there is an artifact that can be loaded."""
        return _files.get(self._key_of(key)) is not None

    def delete(self, key: str) -> None:
        """Remove an artifact here and in the remote; other machines keep theirs."""
        if (engine := running_engine()) is not None:
            engine.remove_all(name_prefix(self._key_of(key)))

    def _key_of(self, key: str) -> LabelledKey:
        return _files.key(name=self._name, graph=key)
