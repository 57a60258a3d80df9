"""Whose fault an error is."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from s3cache import errors
from s3cache._problems import (
    Problems,
    code_of,
    is_devices_trouble,
    is_machines_trouble,
    reason_for,
)
from s3cache.errors import AccessDeniedError, ClosedError, ConfigError, PermanentError
from s3cache.stats import Reason
from s3cache.util.pages import known

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize(
    "said",
    [
        "CUDA driver error: out of memory",
        "CUDA error: initialization error\nCompile with `TORCH_USE_CUDA_DSA`",
        "Triton Error [CUDA]: no kernel image is available for execution on the device",
        "HIP error: out of memory",
        "No valid triton configs. OutOfMemoryError: out of memory",
    ],
)
def test_what_a_driver_says_is_no_fault_of_an_entry(said: str) -> None:
    for error in (RuntimeError(said), chained(RuntimeError(said))):
        assert is_devices_trouble(error)
        assert reason_for(error) is Reason.DEVICE


@pytest.mark.parametrize(
    "said",
    [
        "CUDA driver error: device kernel image is invalid",
        "Triton Error [CUDA]: named symbol not found",
        "No valid triton configs. OutOfResources: out of resource: shared memory",
        "a model's own error",
    ],
)
def test_what_a_driver_says_of_the_image_itself_is(said: str) -> None:
    assert not is_devices_trouble(chained(RuntimeError(said)))


@pytest.mark.parametrize("outer", [PermanentError("the client refuses"), ClosedError("no thread")])
@pytest.mark.parametrize("lacking", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
def test_what_is_wanting_is_the_reason_whatever_is_raised_for_it(
    lacking: Exception, outer: Exception
) -> None:
    outer.__cause__ = lacking
    assert reason_for(outer) is Reason.MACHINE
    assert reason_for(MemoryError()) is Reason.MACHINE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AccessDeniedError("not allowed"), "denied"),
        (ConfigError("local directory", "others may write to it", "chmod it"), "ConfigError"),
        (RuntimeError("a mistake"), "error"),
    ],
)
def test_the_warning_ends_with_where_to_read_on(
    error: Exception, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    Problems(strict=False).met("place", "it was not done", error)
    (message,) = caplog.messages
    assert message == f"it was not done: {error} (s3cache explain {code})"


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_is_known_by_the_name_of_its_class(name: str) -> None:
    """One of somebody else's that is derived from it, too; one that is not, by its reason."""
    kind = getattr(errors, name)
    error = kind.__new__(type("Derived", (kind,), {"__module__": "elsewhere"}))
    assert code_of(error) == name
    assert known([name]) == [name]
    assert code_of(ValueError("x")) == "error"
    assert code_of(MemoryError()) == "machine"


@pytest.mark.skipif(sys.platform != "linux", reason="the dynamic loader is that of Linux")
@pytest.mark.parametrize("lacking", ["a library", "a version of a library"])
def test_nor_is_a_library_that_a_kernel_needs_and_the_machine_has_not(
    tmp_path: Path, lacking: str
) -> None:
    """As libgomp in a small image, or the C library of an older system."""
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    needed, kernel = tmp_path / "libneeded.so", tmp_path / "kernel.so"
    versions = tmp_path / "versions"
    versions.write_text("NEW_2 { global: *; };\n")
    build(needed, "int needed() { return 1; }", f"-Wl,--version-script={versions}")
    build(kernel, "int needed(); int kernel() { return needed(); }", str(needed))
    load_elsewhere(kernel)  # it is sound, and loads where there is what it needs
    if lacking == "a library":
        needed = needed.rename(tmp_path / "elsewhere")
    else:
        versions.write_text("OLD_1 { global: *; };\n")
        needed.unlink()
        build(needed, "int needed() { return 1; }", f"-Wl,--version-script={versions}")
    with pytest.raises(OSError, match=r"libneeded|NEW_2") as raised:
        load_elsewhere(kernel)
    assert is_machines_trouble(raised.value)
    assert is_machines_trouble(chained(raised.value))


def build(target: Path, source: str, *options: str) -> None:
    """A shared library of C++."""
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-x", "none", *options, "-o", str(target)],
        input=source.encode(),
        check=True,
    )


def load_elsewhere(library: Path) -> None:
    """Load it in a process that has loaded nothing yet; raises what that one met."""
    script = "import ctypes, sys\ntry: ctypes.CDLL(sys.argv[1])\nexcept OSError as e: print(e)"
    said = subprocess.run(
        [sys.executable, "-c", script, str(library)], capture_output=True, text=True, check=True
    )
    if said.stdout:
        raise OSError(said.stdout.strip())
