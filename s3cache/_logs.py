"""The loggers, named by what they tell, and what is heard of them where nobody has set up logging.

``logging.getLogger("s3cache")`` stands above all of them. No message names s3cache: the logger's
name does. Python shows warnings without that name where no handler is set up at all; so there they
get it from here.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TypeAlias

from s3cache._words import printable_lines

__all__ = ["Topic", "logger_of"]

_NAME = "s3cache"

#: What follows ``s3cache.`` in the names of loggers.
Topic: TypeAlias = Literal[
    "bypasses", "lookups", "metrics", "ranks", "records", "saves", "storage", "trust"
]


def logger_of(topic: Topic | None = None) -> logging.Logger:
    """The logger of ``topic``; without one, that of turning the cache on and of settings."""
    logger = logging.getLogger(f"{_NAME}.{topic}" if topic else _NAME)
    logger.addFilter(_made_printable)  # which is added once
    return logger


def _made_printable(record: logging.LogRecord) -> bool:
    """Escape what a terminal would obey: most of what is logged quotes servers and entries."""
    said = record.getMessage()
    if (fit := printable_lines(said)) != said:
        record.msg, record.args = fit, None
    if record.exc_info and not record.exc_text:
        text = _plain.formatException(record.exc_info)
        if (fit := printable_lines(text)) != text:
            record.exc_text = fit  # handlers that show it take it from here
    return True


_plain = logging.Formatter()


class _Unheard(logging.Handler):
    """Takes the place of :data:`logging.lastResort`, and says who it is that warns.

    Where any handler of the program's own gets the record, or ``lastResort`` is taken away, it
    does nothing.
    """

    def emit(self, record: logging.LogRecord) -> None:
        last = logging.lastResort
        if last is None or record.levelno < last.level or self._is_heard(record.name):
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as every handler: there may be no stderr
            self.handleError(record)

    def _is_heard(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def _be_heard() -> None:
    handler = _Unheard()
    handler.setFormatter(logging.Formatter(f"{_NAME}: %(message)s"))
    logging.getLogger(_NAME).addHandler(handler)


_be_heard()
