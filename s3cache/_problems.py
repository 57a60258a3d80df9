"""Keep errors from the user's program: each becomes a reason and one warning, or is raised."""

from __future__ import annotations

import errno
import re
import threading

from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    CorruptError,
    DownloadTimeoutError,
    NoSpaceError,
    S3CacheError,
    StoreError,
    UntrustedError,
)
from s3cache.stats import Reason
from s3cache.util.logs import logger_of
from s3cache.util.pages import pointer

__all__ = ["Problems", "code_of", "is_devices_trouble", "is_machines_trouble", "reason_for"]

logger, trust = logger_of("storage"), logger_of("trust")


def reason_for(error: Exception) -> Reason:
    """Return the reason that a miss, or a refused save, gives for ``error``."""
    if isinstance(error, MemoryError) or (isinstance(error, _OURS) and _is_lacking(error)):
        return Reason.MACHINE
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    return Reason.DEVICE if is_devices_trouble(error) else Reason.ERROR


def code_of(error: Exception) -> str:
    """Return the code of the documentation's section on ``error``.

    For an error that is not s3cache's own, that is the reason that it becomes.
    """
    for kind in type(error).__mro__:
        if kind.__module__ == S3CacheError.__module__:
            return kind.__name__
    return str(reason_for(error))


def _is_lacking(error: BaseException) -> bool:
    """Return whether ``error`` was raised because the system lacked memory or descriptors."""
    while (before := error.__cause__ or error.__context__) is not None:
        if isinstance(before, MemoryError):
            return True
        if isinstance(before, OSError) and before.errno in _LACKING:
            return True
        error = before
    return False


def is_machines_trouble(error: BaseException | None) -> bool:
    """Return whether ``error`` says that this machine lacks something, not that an entry is bad."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        # The system refused to make, write or open a file. A missing one may be the entry's fault.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            return True
        # The dynamic loader says it in words: no room, a file system without execution, a library
        # that is missing or too old.
        if isinstance(error, (OSError, ImportError)) and any(
            words in str(error) for words in _TROUBLE_IN_WORDS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_devices_trouble(error: BaseException | None) -> bool:
    """Return whether the driver of an accelerator failed to load a kernel that is sound.

    The kernel was compiled for such a device and driver, which lacks memory or is lost. The driver
    is not to blame where it says that the image itself is no kernel.
    """
    while error is not None:
        text = str(error)
        if _DRIVER.search(text) and not _NO_KERNEL.search(text):
            return True
        error = error.__cause__
    return False


# As "CUDA driver error: out of memory", "Triton Error [CUDA]: no kernel image is available". torch
# drops the class of the error where no configuration of a kernel can be loaded.
_DRIVER = re.compile(r"\b(CUDA|HIP|XPU)( driver)? error:|Triton Error \[\w+\]|\bOutOfMemoryError:")
_NO_KERNEL = re.compile(r"kernel image is invalid|named symbol not found")

# What the system lacks at the moment says nothing of the store.
_LACKING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_TROUBLE_IN_WORDS = (
    "failed to map segment from shared object",
    "annot allocate memory",
    "Too many open files",
    "No usable temporary directory",
    "cannot open shared object file",  # glibc
    "' not found (required by",  # ... of a version, as GLIBC_2.38
    "Error loading shared library",  # musl
    "Library not loaded",  # macOS
)

# What is raised in the place of other errors.
_OURS = (StoreError, ClosedError)

# The first that fits.
_REASONS: tuple[tuple[type[Exception], Reason], ...] = (
    (CorruptError, Reason.CORRUPT),
    (UntrustedError, Reason.UNTRUSTED),
    (DownloadTimeoutError, Reason.TIMEOUT),
    (AccessDeniedError, Reason.DENIED),
    (NoSpaceError, Reason.FULL),
    (StoreError, Reason.UNAVAILABLE),
    (ClosedError, Reason.UNAVAILABLE),
    (ConfigError, Reason.UNAVAILABLE),  # of the store or the directory; a key's is raised
)


class Problems:
    """Warn of each kind of error once, or raise it where the cache is strict."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._mutex = threading.Lock()
        self._warned: set[str] = set()

    def met(self, where: str, text: str, error: Exception) -> None:
        """Raise ``error`` if strict, else :meth:`warn`."""
        if self._strict:
            raise error
        self.warn(where, text, error)

    def warn(self, where: str, text: str, error: Exception) -> None:
        """Warn of ``error``, unless of one of its kind before."""
        reason = reason_for(error)
        with self._mutex:
            if (kind := f"{where} {reason}") in self._warned:
                return
            self._warned.add(kind)
        # A mistake of ours needs its traceback.
        traceback_of = error if reason is Reason.ERROR else None
        log = trust if isinstance(error, UntrustedError) else logger
        # The reason is what counts and records have as well; that of a setting says too little.
        code = code_of(error) if isinstance(error, ConfigError) else str(reason)
        cause = str(error) or type(error).__name__
        log.warning("%s: %s %s", text, cause, pointer(code), exc_info=traceback_of)
