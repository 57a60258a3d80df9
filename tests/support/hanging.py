"""File systems that hang: one that is frozen, and one with a server that never answers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")
_DETACH = 2  # umount2(2)


class FreezableDisk:
    """An ext4 disk. While it is frozen, a process that changes it hangs and cannot be killed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def mounted(cls, below: Path) -> Iterator[FreezableDisk]:
        """Mount a disk in ``below``. Skip the test if the kernel does not allow that."""
        if os.geteuid() != 0 or not all(map(shutil.which, _TOOLS)):
            pytest.skip("to mount and freeze a file system needs root and the tools of Linux")
        image, path = below / "image", below / "disk"
        image.touch()
        os.truncate(image, 16 << 20)
        path.mkdir()
        _run("mkfs.ext4", "-q", str(image))
        if _run("mount", "-o", "loop", str(image), str(path)):
            pytest.skip("no loop device can be mounted here")
        path.chmod(0o700)
        try:
            disk = cls(path)
            with disk.frozen():
                pass
            yield disk
        finally:
            _run("umount", "--lazy", str(path))

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the disk during the block. Skip the test if that is not possible."""
        if _run("fsfreeze", "--freeze", str(self.path)):
            pytest.skip("file systems cannot be frozen here")
        try:
            yield
        finally:
            _run("fsfreeze", "--unfreeze", str(self.path))


@contextlib.contextmanager
def dead_mount(path: Path) -> Iterator[None]:
    """Mount a file system at ``path`` with a live server that never answers, like a dead NFS.

    Skip the test if the kernel does not allow that. At the end, calls that hang fail.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as exc:
        pytest.skip(f"FUSE is not available here: {exc}")
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"dead", os.fsencode(path), b"fuse", 0, options):
            pytest.skip(f"mounting is not permitted here: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.umount2(os.fsencode(path), _DETACH)
    finally:
        os.close(server)


def _run(*command: str) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode
