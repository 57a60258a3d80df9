"""Errors have one line of text, can be pickled, and map to a reason."""

from __future__ import annotations

import errno
import pickle

import pytest

from s3cache import errors
from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    CorruptError,
    PermanentError,
    Reason,
    StoreError,
    TruncatedError,
    UntrustedError,
    code_of,
    is_device_trouble,
    is_machine_trouble,
    reason_for,
)
from s3cache.util.logs import Problems
from s3cache.util.text import sections_on

ERRORS = [
    (ConfigError("option x", "is bad", "use y"), "option x: is bad; use y"),
    (CorruptError("header", "is not msgpack"), "header: is not msgpack"),
    (TruncatedError("frame", 3, 48), "frame: ends after 3 bytes, needs at least 48"),
    (UntrustedError("unsigned", "by x"), "an entry is not trusted (unsigned): by x"),
    (StoreError("reset"), "reset"),
    (
        errors.TransientError("reset", op="get", store="s3://b", key="k", attempts=3, elapsed_s=1),
        "get s3://b k: reset (gave up after 3 attempts in 1.0 s)",
    ),
]


@pytest.mark.parametrize(("error", "text"), ERRORS, ids=lambda each: type(each).__name__)
def test_an_error_is_the_same_after_pickling(error: Exception, text: str) -> None:
    assert str(error) == text
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (text, vars(error))


# -- causes of errors


def chained(error: BaseException) -> RuntimeError:
    outer = RuntimeError("cannot be rebuilt")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("is_machine", "error"),
    [
        *((True, MemoryError()), (False, EOFError()), (False, ValueError("bad"))),
        (True, OSError(errno.EMFILE, "Too many open files")),
        (True, OSError(errno.ENOSPC, "No space left on device")),
        (True, ImportError("kernel.so: failed to map segment from shared object")),
        (True, OSError("libx.so: cannot open shared object file: No such file or directory")),
        (True, FileNotFoundError(errno.ENOENT, "No usable temporary directory found in [...]")),
        (False, OSError("kernel.so: invalid ELF header")),
        (False, FileNotFoundError(errno.ENOENT, "No such file or directory")),
    ],
)
def test_errors_of_a_machine_are_not_blamed_on_an_entry(is_machine: bool, error: Exception) -> None:
    assert is_machine_trouble(error) is is_machine_trouble(chained(error)) is is_machine


@pytest.mark.parametrize(
    ("is_device", "text"),
    [
        (True, "CUDA driver error: out of memory"),
        (True, "Triton Error [CUDA]: no kernel image is available for execution on the device"),
        (True, "HIP error: out of memory"),
        (True, "No valid triton configs. OutOfMemoryError: out of memory"),
        (False, "CUDA driver error: device kernel image is invalid"),
        (False, "No valid triton configs. OutOfResources: out of resource: shared memory"),
        (False, "a model's own error"),
    ],
)
def test_a_driver_is_blamed_unless_its_error_blames_the_kernel(is_device: bool, text: str) -> None:
    for error in (RuntimeError(text), chained(RuntimeError(text))):
        assert is_device_trouble(error) is (reason_for(error) is Reason.DEVICE) is is_device


@pytest.mark.parametrize("outer", [PermanentError("the client refuses"), ClosedError("no thread")])
@pytest.mark.parametrize("lacking", [MemoryError(), OSError(errno.EMFILE, "Too many open files")])
def test_a_lack_of_memory_or_descriptors_is_the_reason_for_any_outer_error(
    lacking: Exception, outer: Exception
) -> None:
    outer.__cause__ = lacking
    assert reason_for(outer) is Reason.MACHINE
    assert reason_for(MemoryError()) is Reason.MACHINE


def test_a_warning_ends_with_the_command_that_explains_it(caplog: pytest.LogCaptureFixture) -> None:
    error = AccessDeniedError("not allowed")
    Problems(strict=False).raise_or_warn("place", "it was not done", error)
    assert caplog.messages == [f"it was not done: {error} (s3cache explain denied)"]


@pytest.mark.parametrize("name", errors.__all__)
def test_the_code_of_an_error_is_the_name_of_its_class(name: str) -> None:
    """A derived class of a user has the same code. Other errors have the code of their reason."""
    kind = getattr(errors, name)
    error = kind.__new__(type("Derived", (kind,), {"__module__": "elsewhere"}))
    assert code_of(error) == name
    assert [each.code for each in sections_on(name)] == [name]
    assert code_of(ValueError("x")) == "error"
    assert code_of(MemoryError()) == "machine"


def test_a_reason_equals_its_code_and_a_feature_may_declare_another() -> None:
    """Another process can read it, even if it has not imported the feature."""
    assert str(Reason.GUARD) == f"{Reason.GUARD}" == "guard"
    assert Reason("guard") is Reason.GUARD  # type: ignore[call-arg]  # the enum accepts texts as well
    reason = Reason.declare("test-only", "of a test", of_parts=True)
    assert Reason.declare("test-only", "other words") is reason
    assert (reason, str(reason), reason.text) == ("test-only", "test-only", "of a test")
    assert (reason.of_parts, reason.is_expected, reason in [*Reason]) == (True, False, False)
    assert pickle.loads(pickle.dumps(reason)) is reason
    other = pickle.loads(pickle.dumps(reason).replace(b"test-only", b"test-else"))  # unknown here
    assert (type(other), str(other), other.text) == (Reason, "test-else", "of a test")
    with pytest.raises(ValueError, match="unheard-of"):
        Reason("unheard-of")  # type: ignore[call-arg]
