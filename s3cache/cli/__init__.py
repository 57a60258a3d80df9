"""The command line: ``s3cache ...`` and ``python -m s3cache ...``.

Commands are functions, several to a module, listed in ``_app.py``. They parse arguments and show
results; other packages do the work. :func:`main` runs a command, and turns its errors into one line
and an exit code. All but ``run`` need Typer, which the extra ``cli`` installs.
"""

from __future__ import annotations

import logging
import os
import sys

from s3cache.errors import ConfigError, CorruptError, S3CacheError, UntrustedError, code_of
from s3cache.util.text import command, pointer, printable, redacted

# Exit codes, documented in ``docs/commands.md``.
_FOUND, _USAGE, _STORE, _INTERRUPTED = 1, 2, 3, 130


class _Retries(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"s3cache: {redacted(record.getMessage())}\n")


def main(arguments: list[str]) -> int:
    """Run the command in ``arguments``, and return the exit code that the help documents."""
    if sys.stderr.isatty():  # show retries: they may take minutes
        logger = logging.getLogger("s3cache.storage")
        logger.addHandler(_Retries())
        logger.setLevel(logging.INFO)
    try:
        code = _call(arguments)
        sys.stdout.flush()
    except S3CacheError as exc:
        is_found = isinstance(exc, (CorruptError, UntrustedError))
        code = _FOUND if is_found else _USAGE if isinstance(exc, ConfigError) else _STORE
        more = "" if command() in str(exc) else f" {pointer(code_of(exc))}"
        return _fail(f"{exc}{more}", code)
    except (BrokenPipeError, SystemExit):
        # The reader of the output has closed it, as in `s3cache ls | head`. Typer also exits when a
        # shell completes a word.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as exc:
        # Releases of Typer have its errors in different modules.
        if type(exc).__name__ == "Abort":
            return _INTERRUPTED
        if message := getattr(exc, "format_message", None):
            return _fail(f"{message()} (see s3cache --help)", _USAGE)
        raise
    return code if isinstance(code, int) else 0


def _call(arguments: list[str]) -> object:
    try:
        from s3cache.cli._app import program
    except ModuleNotFoundError as exc:
        if exc.name not in ("typer", "click"):
            raise
        if arguments[:1] == ["run"]:
            from s3cache.cli._run import run_without_typer

            run_without_typer(arguments[1:])
        fix = "run: pip install 'torch-s3cache[cli]' (s3cache run works without it)"
        raise ConfigError("the command line", f"needs {exc.name}", fix) from None
    return program(args=arguments, prog_name="s3cache", standalone_mode=False)


def _fail(text: str, code: int) -> int:
    sys.stderr.write(f"s3cache: error: {printable(redacted(text))}\n")
    return code
