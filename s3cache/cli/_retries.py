"""What a store fails to do, told at a terminal: it may be tried again for two minutes."""

from __future__ import annotations

import contextlib
import logging
import sys

from s3cache.cli._output import redacted

__all__ = ["tell_of_retries"]


class _Told(logging.Handler):
    """Says what is logged on standard error, above a bar if one is drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"s3cache: {redacted(record.getMessage())}\n")


def tell_of_retries() -> None:
    """Have each request that failed and is tried again told, from now on."""
    logger = logging.getLogger("s3cache.storage")
    if not any(isinstance(each, _Told) for each in logger.handlers):
        logger.addHandler(_Told())
        logger.setLevel(logging.INFO)
