"""The command line: ``s3cache ...`` and ``python -m s3cache ...``.

Commands are functions, several to a module, listed here in the order of ``--help``. They parse
arguments and show results; other packages do the work. :func:`main` runs a command, and turns its
errors into one line and an exit code.
"""

from __future__ import annotations

import logging
import os
import sys

import typer

from s3cache.cli import _entries, _machine
from s3cache.cli._options import redacted, with_groups
from s3cache.errors import ConfigError, CorruptError, S3CacheError, UntrustedError, code_of
from s3cache.util import __version__
from s3cache.util.text import command, pointer, printable

_COMMANDS = (
    *(_machine.run, _machine.check, _machine.warm, _machine.version, _machine.doctor),
    *(_entries.stats, _machine.report, _entries.ls, _entries.du, _entries.inspect),
    *(_machine.explain, _entries.verify, _entries.rm, _entries.clear, _entries.gc),
    *(_entries.pull, _entries.push, _entries.prefetch, _entries.mirror),
    *(_machine.target, _machine.bench, _machine.keygen),
)
# Arguments after the name of a program belong to the program.
_OF_A_PROGRAM = {"ignore_unknown_options": True, "allow_interspersed_args": False}
# Exit codes, documented in ``docs/commands.md``.
_FOUND, _USAGE, _STORE, _INTERRUPTED = 1, 2, 3, 130

app = typer.Typer(
    name="s3cache",
    help="A shared compile cache for torch.compile in S3-compatible storage.",
    epilog="--url or S3CACHE_URL names the cache; S3CACHE_* variables set the rest. "
    "Exit codes: 0 success, 1 problems found or work left, 2 bad arguments or settings, "
    "3 the store or the disk failed, 130 interrupted.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"s3cache {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    _: bool = typer.Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=_version
    ),
) -> None:
    pass  # its docstring would replace the help of the app


for _command in _COMMANDS:
    _context = _OF_A_PROGRAM if _command in (_machine.run, _machine.check) else None
    app.command(_command.__name__, context_settings=_context)(with_groups(_command))


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
        code = app(args=arguments, prog_name="s3cache", standalone_mode=False)
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


def _fail(text: str, code: int) -> int:
    sys.stderr.write(f"s3cache: error: {printable(redacted(text))}\n")
    return code
