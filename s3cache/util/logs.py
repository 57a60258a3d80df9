"""The loggers by topic, their messages where no program has set up logging, and what warns once.

No message names s3cache: the logger's name does. Python shows warnings without that name where no
handler is set up at all, so it is added there.
"""

from __future__ import annotations

import logging
import threading
from typing import Literal, TypeAlias

from s3cache.errors import ConfigError, Reason, UntrustedError, code_of, reason_for
from s3cache.util.text import pointer, printable_lines

_NAME = "s3cache"
_PLAIN = logging.Formatter()

#: What follows ``s3cache.`` in the names of loggers.
Topic: TypeAlias = Literal[
    "bypasses", "lookups", "metrics", "ranks", "recall", "records", "saves", "storage", "trust"
]


def logger_of(topic: Topic | None = None) -> logging.Logger:
    """Return the logger of ``topic``; without one, that of turning the cache on and of settings."""
    logger = logging.getLogger(f"{_NAME}.{topic}" if topic else _NAME)
    logger.addFilter(_make_printable)  # which is added once
    return logger


def _make_printable(record: logging.LogRecord) -> bool:
    """Escape what a terminal would obey, which servers and entries that are quoted may contain."""
    plain = record.getMessage()
    message = printable_lines(plain)
    if not logging.getLogger(record.name).hasHandlers():
        message = f"{_NAME}: {message}"  # logging.lastResort shows no more than this
    if message != plain:
        record.msg, record.args = message, None
    if record.exc_info and not record.exc_text:
        text = _PLAIN.formatException(record.exc_info)
        if (escaped := printable_lines(text)) != text:
            record.exc_text = escaped  # handlers that show it take it from here
    return True


class Problems:
    """Keep errors from the user's program: warn of each kind once, or raise it if ``strict``."""

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
        # The reason is what counts and records have as well; that of a setting says too little.
        code = code_of(error) if isinstance(error, ConfigError) else str(reason)
        logger_of("trust" if isinstance(error, UntrustedError) else "storage").warning(
            "%s: %s %s",
            text,
            str(error) or type(error).__name__,
            pointer(code),
            exc_info=error if reason is Reason.ERROR else None,  # a mistake of ours
        )
