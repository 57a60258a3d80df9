"""The seam at Triton's directory, to which an entry's kernels go and from which they are loaded.

torch writes the kernels of an entry to files, unless there are some under their names already, and
loads those by name, at once or when they are first run. So nobody else may be able to write there,
or to have written: what is loaded are then the bytes that were verified, or what this user's torch
has compiled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from s3cache.errors import ConfigError
from s3cache.hooks._patching import Patches
from s3cache.store import Directory, check_way, make_parents
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import TritonBundle

__all__ = ["TritonSeam", "check_triton_directory"]

Emit: TypeAlias = Function[object]

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class TritonSeam:
    """Looks at where kernels go before they go there.

    Args:
        is_rebuilding: whether this thread makes an entry of s3cache's into a callable.
    """

    def __init__(self, is_rebuilding: Callable[[], bool]) -> None:
        self._is_rebuilding = is_rebuilding

    def install(self, patches: Patches) -> None:
        patches.replace(internals.emit_triton_bundle, self._emitter)

    def _emitter(self, original: Emit) -> Emit:
        def read_and_emit(bundle: TritonBundle, *args: object, **kwargs: object) -> object:
            if self._is_rebuilding():
                for kernel in bundle.kernel_artifacts:
                    base = internals.triton_directory.get()(kernel.device)
                    check_triton_directory(base, kernel.kernel_hash)
            return original(bundle, *args, **kwargs)

        return read_and_emit


def check_triton_directory(base: str, kernel: str) -> None:
    """Make ``base`` for this user alone, unless it is there; look at what there is of a kernel.

    Raises:
        PermissionError: others may write in it, or what is there is not this user's alone. That
            says nothing of the entry.
    """
    try:
        make_parents(os.path.abspath(base))
        check_way(base)  # before it is opened: from then on the name leads there
        directory = Directory.at(base, make=True)
        # Where nobody else gets in, it does not matter what the umask left open within.
        is_private = not os.fstat(directory.fd).st_mode & 0o077
        with contextlib.suppress(FileNotFoundError):  # there is nothing for it yet
            _check_files(directory, kernel, 0 if is_private else _BY_OTHERS)
    except ConfigError as exc:
        raise PermissionError(
            errno.EACCES, f"kernels of Triton are not loaded from where others may write: {exc}"
        ) from exc


def _check_files(base: Directory, kernel: str, forbidden: int) -> None:
    place = f"{base.path}/{kernel}"
    status = os.stat(kernel, dir_fd=base.fd, follow_symlinks=False)
    _check_ours(status, stat.S_ISDIR, forbidden, place)
    fd = os.open(kernel, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=base.fd)
    try:
        for name in os.listdir(fd):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            _check_ours(status, stat.S_ISREG, forbidden, f"{place}/{name}")
    finally:
        os.close(fd)


def _check_ours(
    status: os.stat_result, is_kind: Callable[[int], bool], forbidden: int, place: str
) -> None:
    is_ours = is_kind(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or status.st_mode & forbidden:
        raise ConfigError(
            place,
            "is not this user's alone",
            "remove it, or give TRITON_CACHE_DIR another directory",
        )
