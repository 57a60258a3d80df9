"""The tree of errors that s3cache raises, and the reason that each becomes.

::

    S3CacheError
    ├── ConfigError (ValueError)     a URL, setting or key that cannot be used; nothing was tried
    ├── CorruptError                 malformed bytes, or a wrong digest; becomes a miss
    │   └── TruncatedError           ... because they end too early
    ├── UntrustedError               intact, but not signed by a trusted key; becomes a miss
    ├── ClosedError                  used after close()
    ├── MissError                    on_miss=error: a graph would have to be compiled
    ├── UnsupportedTorchError        the installed torch lacks a name that the cache needs
    └── StoreError                   an operation of a store failed
        ├── PreconditionError        another writer was first; success for content-addressed data
        ├── TransientError           worth a retry: time-outs, resets, 5xx, throttling
        │   ├── CircuitOpenError     not tried: too many failures in a row
        │   └── DownloadTimeoutError the caller waits no longer; the download continues
        └── PermanentError           a retry is useless
            ├── AccessDeniedError    credentials missing, wrong, expired or without permission
            │   └── CredentialsError ... there are none: their source has none, or fails
            ├── MissingContainerError  the bucket or root directory does not exist
            ├── ReadOnlyError        the store was opened for reading only
            ├── NoSpaceError         disk or quota full
            └── TooLargeError        the server, or a proxy before it, takes no object of this size

A missing object is not an error: ``get`` and ``head`` return ``None``.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import re
from collections.abc import Iterator
from enum import Enum


class Reason(str, Enum):
    """Why a lookup missed, or why an entry was not saved.

    This is the table of the core's reasons. A feature declares its own in its ``Feature``. ``make
    docs-settings`` writes all of them into ``docs/reasons.md``.

    Attributes:
        text: the reason in words.
        is_expected: whether it needs no action.
        of_parts: whether a part of a graph that has missed as a whole can miss for this reason.
    """

    text: str
    is_expected: bool
    of_parts: bool

    ABSENT = ("absent", "no entry has been saved under this key", True)
    GUARD = ("guard", "no entry under this key has guards on sizes or memory that hold here", True)
    CORRUPT = ("corrupt", "the entry was damaged or could not be used, and was set aside")
    UNTRUSTED = ("untrusted", "no entry under this key is signed by a signer that is trusted here")
    TIMEOUT = ("timeout", "the remote did not answer within lookup_timeout_s")
    UNAVAILABLE = ("unavailable", "the store could not be reached")
    DENIED = ("denied", "credentials are missing, or not allowed to do it")
    FULL = ("full", "there was no room on the disk or in the queue of uploads")
    MACHINE = ("machine", "this machine had no room, memory or file descriptors for it")
    DEVICE = ("device", "the driver of the accelerator would not load its kernels")
    DISABLED = ("disabled", "the mode does not allow it", True)
    FORCED = ("forced", "recache=True asks to compile again", True)
    ERROR = ("error", "s3cache made a mistake: its log has more")

    def __new__(
        cls, code: str, text: str, is_expected: bool = False, of_parts: bool = False
    ) -> Reason:
        """Return the member that is equal to its code."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.text, member.is_expected, member.of_parts = text, is_expected, of_parts
        return member

    @classmethod
    def declare(
        cls, code: str, text: str, is_expected: bool = False, of_parts: bool = False
    ) -> Reason:
        """Return the reason with ``code``; make it if a feature has not declared it before."""
        with contextlib.suppress(ValueError):
            return cls(code)  # type: ignore[call-arg]
        reason = _OF_FEATURES[code] = str.__new__(cls, code)
        reason._name_, reason._value_ = code.upper(), code
        reason.text, reason.is_expected, reason.of_parts = text, is_expected, of_parts
        return reason

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        return _OF_FEATURES.get(str(value))

    def __reduce_ex__(self, _: object) -> tuple[object, ...]:
        """Pickle the whole reason: the reader may not have imported its feature."""
        return Reason.declare, (self.value, self.text, self.is_expected, self.of_parts)

    __str__ = str.__str__  # the code, in every release of Python


_OF_FEATURES: dict[str, Reason] = {}


# -- the tree


def printable(text: str) -> str:
    """Return ``text`` in one line, with everything escaped that a terminal or page interprets.

    Texts of servers, entries and files may contain escape sequences, control characters, marks that
    change the direction of writing, and new lines that forge a line of ours.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_lines(text: str) -> str:
    """Apply :func:`printable` to each line; only for text with line breaks of our own."""
    return "\n".join(map(printable, text.split("\n")))


class S3CacheError(Exception):
    """Root of all errors that s3cache raises on purpose.

    The message is one printable line, even with text from a server or an entry. Errors can be
    pickled: ``args`` are the arguments. ``reason`` is that of a miss or refused save.
    """

    reason: Reason = Reason.ERROR

    def __str__(self) -> str:
        return printable(self._text())

    def _text(self) -> str:
        return super().__str__()


class ConfigError(S3CacheError, ValueError):
    """Bad input from the user: the message names the thing, the cause and the fix.

    >>> str(ConfigError("setting timeout_s", "'soon' is not a number", "give seconds, e.g. 10"))
    "setting timeout_s: 'soon' is not a number; give seconds, e.g. 10"
    """

    reason = Reason.UNAVAILABLE  # for a store or directory; errors in keys are raised

    def __init__(self, thing: str, cause: str, fix: str) -> None:
        super().__init__(thing, cause, fix)
        self.thing, self.cause, self.fix = thing, cause, fix

    def _text(self) -> str:
        return f"{self.thing}: {self.cause}; {self.fix}"


class CorruptError(S3CacheError):
    """Bytes are malformed or do not match their digest; ``where`` names the part."""

    reason = Reason.CORRUPT

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where, self.problem = where, problem

    def _text(self) -> str:
        return f"{self.where}: {self.problem}"


class TruncatedError(CorruptError):
    """The bytes end too early; at least ``needed`` bytes are required to go on."""

    def __init__(self, where: str, have: int, needed: int) -> None:
        super().__init__(where, f"ends after {have} bytes, needs at least {needed}")
        self.args = (where, have, needed)
        self.have, self.needed = have, needed


class UntrustedError(S3CacheError):
    """An entry is intact, but the policy forbids its use.

    ``cause`` is one of :data:`s3cache.trust.Cause`, ``detail`` the signer that the entry names,
    which may be forged.
    """

    reason = Reason.UNTRUSTED

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(cause, detail)
        self.cause, self.detail = cause, detail

    def _text(self) -> str:
        return f"an entry is not trusted ({self.cause}): {self.detail}"


class ClosedError(S3CacheError):
    """The object was used after it was closed."""

    reason = Reason.UNAVAILABLE


class MissError(S3CacheError):
    """With ``on_miss=error``, a graph would have to be compiled; the message explains the miss."""


class UnsupportedTorchError(S3CacheError):
    """The installed torch lacks a name that the compile cache uses; the message has the name."""


class StoreError(S3CacheError):
    """A store operation failed.

    ``op`` is the verb that failed, ``store`` the store's URL without credentials, and ``key`` the
    object, or ``""`` for the store as a whole. It gave up after ``attempts`` in ``elapsed_s``.
    """

    reason = Reason.UNAVAILABLE

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        store: str = "",
        key: str = "",
        attempts: int = 1,
        elapsed_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.op, self.store, self.key = op, store, key
        self.attempts, self.elapsed_s = attempts, elapsed_s

    def _text(self) -> str:
        where = " ".join(part for part in (self.op, self.store, self.key) if part)
        text = f"{where}: {self.message}" if where else self.message
        if self.attempts > 1:
            text += f" (gave up after {self.attempts} attempts in {self.elapsed_s:.1f} s)"
        return text


class PreconditionError(StoreError):
    """``put(mode="create")`` found an object already there; nothing was written."""


class TransientError(StoreError):
    """The same call may succeed a moment later."""


class CircuitOpenError(TransientError):
    """The circuit breaker is open: the call failed at once, and sent nothing."""


class DownloadTimeoutError(TransientError):
    """The caller waits no longer; the download continues."""

    reason = Reason.TIMEOUT


class PermanentError(StoreError):
    """The same call will fail again until the cause is removed."""


class AccessDeniedError(PermanentError):
    """Credentials are missing, wrong or expired, or do not allow the operation."""

    reason = Reason.DENIED


class CredentialsError(AccessDeniedError):
    """There are no credentials: their source has none, or fails. No request was sent."""


class MissingContainerError(PermanentError):
    """The bucket or root directory does not exist."""


class ReadOnlyError(PermanentError):
    """The store was opened read-only."""


class NoSpaceError(PermanentError):
    """The disk, bucket or quota is full."""

    reason = Reason.FULL


class TooLargeError(PermanentError):
    """The server, or a proxy before it, takes no object of this size."""


# -- from an error to its reason

# A process that cannot map this many bytes lacks memory.
_SPARE_BYTES = 16 << 20
_LOADER = re.compile(
    "failed to map segment from shared object|annot allocate memory|Too many open files"
    r"|No usable temporary directory|cannot open shared object file|' not found \(required by"
)
# Such as "CUDA driver error: out of memory", "Triton Error [CUDA]: no kernel image is available".
# torch drops the class of the error if no configuration of a kernel can be loaded.
_DRIVER = re.compile(r"\b(CUDA|HIP|XPU)( driver)? error:|Triton Error \[\w+\]|\bOutOfMemoryError:")
_NO_KERNEL = re.compile(r"kernel image is invalid|named symbol not found")


def reason_for(error: Exception) -> Reason:
    """Return the reason of a miss, or of a refused save, that ``error`` causes."""
    if isinstance(error, (StoreError, ClosedError)):  # they replace other errors
        lacks_descriptors = _has_code(error, errno.EMFILE, errno.ENFILE)
        return Reason.MACHINE if lacks_memory(error) or lacks_descriptors else error.reason
    if isinstance(error, S3CacheError):
        return error.reason
    if lacks_memory(error):
        return Reason.MACHINE
    return Reason.DEVICE if is_device_trouble(error) else Reason.ERROR


def code_of(error: Exception) -> str:
    """Return the code of the section in the documentation on ``error``.

    For an error that is not s3cache's own, return its reason.
    """
    names = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    return next(names, None) or str(reason_for(error))


def is_machine_trouble(error: BaseException) -> bool:
    """Return whether this machine caused ``error``, not a bad entry.

    The system refused a file (a missing one may be the entry's fault), or the dynamic loader
    reports in words that it lacks room, a right to execute, or a library.
    """
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT))
        or (isinstance(cause, (OSError, ImportError)) and _LOADER.search(str(cause)) is not None)
        for cause in causes(error)
    )


def is_device_trouble(error: BaseException) -> bool:
    """Return whether the driver of an accelerator failed to load a sound kernel.

    The device lacks memory or is lost. If the image is not a kernel, the entry is at fault.
    """
    texts = map(str, causes(error))
    return any(_DRIVER.search(text) and not _NO_KERNEL.search(text) for text in texts)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def lacks_memory(error: BaseException) -> bool:
    """Return whether ``error`` comes from a lack of memory, or this process has hardly any left.

    Libraries may drop the ``MemoryError`` and raise another error, such as a broken connection.
    """
    if _has_code(error, errno.ENOMEM):
        return True
    try:
        mmap.mmap(-1, _SPARE_BYTES).close()  # not from malloc(), which would keep these bytes
    except (OSError, MemoryError) as exc:
        return _has_code(exc, errno.ENOMEM)
    return False


def _has_code(error: BaseException, *codes: int) -> bool:
    """Return whether a cause has one of these codes; a MemoryError has that of lacking memory."""
    lacking = errno.ENOMEM in codes
    return any(
        getattr(cause, "errno", None) in codes or (lacking and isinstance(cause, MemoryError))
        for cause in causes(error)
    )


__all__ = sorted(
    name
    for name, kind in globals().items()
    if isinstance(kind, type) and issubclass(kind, S3CacheError)
)
