"""Every error s3cache raises, in one tree.

::

    S3CacheError
    ├── ConfigError (ValueError)     a URL, setting or key that cannot be used; nothing was tried
    ├── CorruptError                 bytes that are not what they claim to be; becomes a miss
    │   └── TruncatedError           ... because they end too early
    ├── UntrustedError               whole, but no trusted key has signed it; a miss
    ├── ClosedError                  used after close()
    ├── UnsupportedTorchError        the installed torch lacks what the compile cache uses of it
    └── StoreError                   a store could not do what it was asked
        ├── PreconditionError        someone else was first; success for content-addressed data
        ├── TransientError           worth another try: time-outs, resets, 5xx, throttling
        │   ├── CircuitOpenError     not tried: too many failures in a row just now
        │   └── DownloadTimeoutError the caller waited long enough; the download goes on
        └── PermanentError           no use trying again
            ├── AccessDeniedError    credentials missing, wrong, expired or not allowed to
            ├── MissingContainerError  the bucket, or the root of a directory, is not there
            ├── ReadOnlyError        the store was opened for reading only
            └── NoSpaceError         disk or quota full

An object that is not there is no error: ``get`` and ``head`` return ``None``.
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "CircuitOpenError",
    "ClosedError",
    "ConfigError",
    "CorruptError",
    "DownloadTimeoutError",
    "MissingContainerError",
    "NoSpaceError",
    "PermanentError",
    "PreconditionError",
    "ReadOnlyError",
    "S3CacheError",
    "StoreError",
    "TransientError",
    "TruncatedError",
    "UnsupportedTorchError",
    "UntrustedError",
]


def printable(text: str) -> str:
    """Return ``text`` in one line, with all that a terminal, log or page would obey escaped.

    Texts of servers, entries and files may contain escape sequences, control characters, marks that
    turn the direction of writing, and new lines that forge a line of ours.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_lines(text: str) -> str:
    """Return several lines, each made :func:`printable`: only for text with lines of ours."""
    return "\n".join(map(printable, text.split("\n")))


class S3CacheError(Exception):
    """Root of every error s3cache raises on purpose.

    Its message is one line that can be printed, whatever a server or an entry has in it. Errors
    can be pickled: ``args`` are the arguments.
    """

    def __str__(self) -> str:
        return printable(self._text())

    def _text(self) -> str:
        return super().__str__()


class ConfigError(S3CacheError, ValueError):
    """Bad input from the user: the message names the thing, the cause and the fix.

    >>> str(ConfigError("setting timeout_s", "'soon' is no number", "give seconds, e.g. 10"))
    "setting timeout_s: 'soon' is no number; give seconds, e.g. 10"
    """

    def __init__(self, thing: str, cause: str, fix: str) -> None:
        super().__init__(thing, cause, fix)
        self.thing = thing
        self.cause = cause
        self.fix = fix

    def _text(self) -> str:
        return f"{self.thing}: {self.cause}; {self.fix}"


class CorruptError(S3CacheError):
    """Bytes are malformed or do not match their digest; ``where`` says in which part."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where = where
        self.problem = problem

    def _text(self) -> str:
        return f"{self.where}: {self.problem}"


class TruncatedError(CorruptError):
    """The bytes end too early; ``needed`` is how many there must be at least to go on."""

    def __init__(self, where: str, have: int, needed: int) -> None:
        super().__init__(where, f"ends after {have} bytes, needs at least {needed}")
        self.args = (where, have, needed)
        self.have = have
        self.needed = needed


class UntrustedError(S3CacheError):
    """An entry is whole, and not one that the policy lets us use.

    Attributes:
        cause: in one word, see :data:`s3cache.trust.Cause`.
        detail: the signer, where the entry names one; nothing that it says can be relied on.
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail

    def _text(self) -> str:
        return f"an entry is not trusted ({self.cause}): {self.detail}"


class ClosedError(S3CacheError):
    """The object was used after it was closed."""


class UnsupportedTorchError(S3CacheError):
    """The installed torch lacks a name that the compile cache uses; the message says which one."""


class StoreError(S3CacheError):
    """A store operation failed.

    Attributes:
        op: the protocol verb that failed (``get``, ``put``, ...).
        store: the store's URL, without credentials.
        key: the object concerned, or ``""`` for the store as a whole.
        attempts: how often the operation was tried in all.
        elapsed_s: seconds from the first try to giving up.
    """

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
        self.op = op
        self.store = store
        self.key = key
        self.attempts = attempts
        self.elapsed_s = elapsed_s

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
    """The circuit breaker is open: the call failed at once, nothing was sent."""


class DownloadTimeoutError(TransientError):
    """The caller waited long enough; the download goes on."""


class PermanentError(StoreError):
    """The same call will fail again until somebody changes something."""


class AccessDeniedError(PermanentError):
    """Credentials are missing, wrong or expired, or do not allow the operation."""


class MissingContainerError(PermanentError):
    """The bucket or root directory does not exist."""


class ReadOnlyError(PermanentError):
    """The store was opened read-only."""


class NoSpaceError(PermanentError):
    """The disk, bucket or quota is full."""
