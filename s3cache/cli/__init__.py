"""The command line: ``s3cache ...`` and ``python -m s3cache ...``.

Commands are functions, several to a module, listed in ``_app.py``. They parse arguments and show
results; the rooms above do the work. :func:`main` is where each command begins and where its
errors end: in one line, and an exit code.
"""

from __future__ import annotations

import os
import sys

from s3cache.util.words import printable

__all__ = ["main"]

# Exit codes, as ``docs/commands.md`` has them.
_FOUND, _USAGE, _STORE, _INTERRUPTED = 1, 2, 3, 130


def main(arguments: list[str]) -> int:
    """Do what the arguments say, and return the exit code.

    Codes: 0 all is well; 1 something was found, or not all could be done; 2 the arguments or
    settings cannot be used; 3 the store or the disk cannot do it; 130 interrupted.
    """
    from s3cache.cli._app import app
    from s3cache.cli._output import error_text, redacted, show_retries
    from s3cache.errors import ConfigError, CorruptError, S3CacheError, UntrustedError

    if sys.stderr.isatty():
        show_retries()
    try:
        code = app(args=arguments, prog_name="s3cache", standalone_mode=False)
        sys.stdout.flush()
    except S3CacheError as exc:
        is_found = isinstance(exc, (CorruptError, UntrustedError))
        code = _FOUND if is_found else _USAGE if isinstance(exc, ConfigError) else _STORE
        return _fail(redacted(error_text(exc)), code)
    except (BrokenPipeError, SystemExit):
        # The reader of the output is gone, as in `s3cache ls | head`. Typer also exits by itself
        # when a shell asks it to complete a word.
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as exc:
        # Typer's own errors are in another module in each release of Typer.
        if type(exc).__name__ == "Abort":
            return _INTERRUPTED
        if say := getattr(exc, "format_message", None):
            return _fail(f"{redacted(say())} (see s3cache --help)", _USAGE)
        raise
    return code if isinstance(code, int) else 0


def _fail(text: str, code: int) -> int:
    sys.stderr.write(f"s3cache: error: {printable(text)}\n")
    return code
