"""Loggers by topic, their messages without logging set up, and warnings that are shown once.

Messages do not contain the name s3cache, because the logger's name does. Without any handler,
Python shows warnings without the logger's name, so it is added then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal, TypeAlias

from s3cache.errors import ConfigError, Reason, UntrustedError, code_of, reason_for
from s3cache.util.text import pointer, printable_lines

_NAME = "s3cache"
_PLAIN = logging.Formatter()

#: The part after ``s3cache.`` in the names of loggers; a feature may have one of its name.
Topic: TypeAlias = Literal["bypasses", "lookups", "metrics", "records", "saves", "storage", "trust"]


def logger_of(topic: Topic | str | None = None) -> logging.Logger:
    """Return the logger of ``topic``; without one, that for enabling the cache and for settings."""
    logger = logging.getLogger(f"{_NAME}.{topic}" if topic else _NAME)
    logger.addFilter(_make_printable)  # added only once
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    """Escape terminal sequences, which quoted text of servers and entries may contain."""
    plain = record.getMessage()
    message = printable_lines(plain)
    if not logging.getLogger(record.name).hasHandlers():
        message = f"{_NAME}: {message}"  # logging.lastResort shows only the message
    if message != plain:
        record.msg, record.args = message, None
    if record.exc_info and not record.exc_text:
        text = _PLAIN.formatException(record.exc_info)
        if (escaped := printable_lines(text)) != text:
            record.exc_text = escaped  # handlers read it here
    return True


# -- loggers of libraries

_in_our_call = ContextVar("s3cache_call", default=False)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Pass warnings that libraries log in the block to our log at DEBUG: our errors repeat them.

    That includes tasks and threads of asyncio that the block starts, and no other code that uses
    the same libraries. It applies to loggers of :func:`watch_libraries`.
    """
    before = _in_our_call.set(True)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the coroutine was destroyed elsewhere
            _in_our_call.reset(before)


def watch_libraries(*names: str) -> None:
    """Make :func:`quiet_libraries` apply to all present loggers of these packages."""
    for name, logger in [*logging.root.manager.loggerDict.items()]:
        if name.partition(".")[0] in names and isinstance(logger, logging.Logger):
            logger.addFilter(_pass_on)  # added only once


def _pass_on(record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING or not _in_our_call.get():
        return True
    ours = logger_of("storage")
    ours.debug("%s: %s", record.name, record.getMessage(), exc_info=record.exc_info)
    return False


class Problems:
    """Keeps errors from the user's program: warns of each kind once, or raises if ``strict``."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._mutex = threading.Lock()
        self._warned: set[str] = set()

    def raise_or_warn(self, where: str, text: str, error: Exception) -> None:
        """Raise ``error`` if strict, else :meth:`warn`."""
        if self._strict:
            raise error
        self.warn(where, text, error)

    def warn(self, where: str, text: str, error: Exception) -> None:
        """Warn of ``error``, unless it is not the first of its kind."""
        reason = reason_for(error)
        with self._mutex:
            if (kind := f"{where} {reason}") in self._warned:
                return
            self._warned.add(kind)
        # Show the reason, like counts and records; for a setting it is not specific enough.
        code = code_of(error) if isinstance(error, ConfigError) else str(reason)
        logger_of("trust" if isinstance(error, UntrustedError) else "storage").warning(
            "%s: %s %s",
            text,
            str(error) or type(error).__name__,
            pointer(code),
            exc_info=error if reason is Reason.ERROR else None,  # a bug of ours
        )
