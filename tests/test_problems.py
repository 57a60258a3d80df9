"""Whose fault an error is."""

from __future__ import annotations

import errno

import pytest

from s3cache._problems import is_machines_trouble


def chained(error: BaseException) -> RuntimeError:
    outer = RuntimeError("cannot be rebuilt")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EPERM, "Operation not permitted"),
        ImportError("kernel.so: failed to map segment from shared object"),
        OSError("kernel.so: cannot allocate memory"),
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in [...]"),
    ],
)
def test_what_a_machine_lacks_is_no_fault_of_an_entry(error: Exception) -> None:
    assert is_machines_trouble(error)
    assert is_machines_trouble(chained(error))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        OSError("kernel.so: invalid ELF header"),
        ImportError("kernel.so: undefined symbol: kernel"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        EOFError(),
    ],
)
def test_other_errors_are(error: Exception) -> None:
    assert not is_machines_trouble(error)
    assert not is_machines_trouble(chained(error))
