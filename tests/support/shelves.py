"""Stores in a directory, with valid and damaged entries of many kinds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from s3cache import entries, frame
from s3cache.store import ObjectFiles


def path_of(files: ObjectFiles, key: str) -> Path:
    """Return the file that holds an object."""
    *parents, name = key.split("/")
    return Path(files.root, "objects", *(f"{parent}+" for parent in parents), name)


class Shelf:
    """A store in a directory, written without a store object."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = ObjectFiles(root)

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    @property
    def names(self) -> set[str]:
        return {info.key for info in self.files.walk()}

    def add(
        self,
        key: str,
        *,
        kind: str = "test",
        variant: str = "",
        torch: str = "2.13.0+cpu",
        tag: str = "",
        device: str = "",
        size: int = 100,
        days: float = 0,
        first: bool = True,
    ) -> str:
        """Add a valid entry, last modified ``days`` ago; return its name."""
        data = frame.encode(
            kind=kind,
            key=key,
            variant=variant,
            schema=2,
            sections={"entry": os.urandom(size)},
            meta={
                "made_by": {"torch": torch, "device": device},
                "components": {"cache_key_tag": ["00", tag]},
                "guards": None,
                "times_ns": [1_500_000_000, 0],
                "runtime": None,
            },
        )
        return self.put(
            entries.first_name(key) if first else entries.variant_name(key, variant), data, days
        )

    def put(self, name: str, data: bytes, days: float = 0) -> str:
        self.files.write(name, data)
        when = time.time() - days * 86400
        os.utime(path_of(self.files, name), (when, when))
        return name

    def damage(self, name: str, at: int = -1) -> None:
        """Change one byte of an object: the last is in a section, an early one in the header."""
        data = bytearray(self.files.read(name) or b"")
        data[at] ^= 1
        self.put(name, bytes(data))


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """An empty remote."""
    return Shelf(tmp_path / "remote")
