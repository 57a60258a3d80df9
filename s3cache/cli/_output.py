"""Show results: tables for people, JSON for programs, and nothing that could be a secret."""

from __future__ import annotations

import contextlib
import json as json_of
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3cache._words import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console

    from s3cache.errors import S3CacheError

__all__ = ["Output", "age", "error_text", "redacted", "show_retries", "size_text"]

# What is no terminal has no width: long names stay whole.
_WIDTH = 240
# Lines of sentences are no longer, however wide the terminal is.
_READABLE = 100
_WORD = re.compile(r"[^\s'\"()<>]*(?:://|@)[^\s'\"()<>]*")
_SECRET = re.compile(r"secret|passw|token|access_?key|credential|signature", re.IGNORECASE)


class Output:
    """Where a command says what it found; with ``--json`` in JSON and in nothing else."""

    def __init__(
        self,
        json: Annotated[
            bool, typer.Option("--json", help="JSON on standard output, for programs.")
        ] = False,
    ) -> None:
        self.json = json

    def record(self, value: object) -> None:
        """One JSON value, on a line of its own."""
        sys.stdout.write(json_of.dumps(_jsonable(value), ensure_ascii=True) + "\n")

    def line(self, text: str) -> None:
        sys.stdout.write(f"{printable(text)}\n")

    def text(self, text: str) -> None:
        """Lines of ours: nothing of others has been put into them but by :func:`printable`."""
        sys.stdout.write(f"{printable_lines(text)}\n")

    def note(self, text: str) -> None:
        """What is beside the point: on standard error, and not with ``--json``."""
        if not self.json:
            sys.stderr.write(f"{printable(text)}\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
        """Columns whose names begin with ``>`` are set to the right."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
        for column in columns:
            table.add_column(
                column.lstrip(">"),
                justify="right" if column.startswith(">") else "left",
                overflow="fold",
            )
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        _console().print(table)

    def markdown(self, title: str, text: str) -> None:
        """Laid out on a terminal; what is none gets ``text`` as it is written."""
        if not sys.stdout.isatty():
            self.text(f"{title}\n\n{text}\n")
            return
        from rich.markdown import Markdown
        from rich.text import Text

        console = _console()
        width = min(console.width, _READABLE)
        console.print(Text(title, style="bold"), "", Markdown(text), "", sep="\n", width=width)

    @contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A bar on standard error, if that is a terminal; call what it gives with each advance."""
        if self.json or not sys.stderr.isatty():
            yield lambda _: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=_console(error=True),
            transient=True,
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)


def _console(*, error: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False)


def redacted(text: str) -> str:
    """``text`` with no password of a URL in it, however the URL is misspelt."""

    def shorter(match: re.Match[str]) -> str:
        word = match[0]
        scheme, separator, rest = word.partition("://")
        before, _, query = rest.partition("?")
        if "@" not in word and not _SECRET.search(query) and ":" not in before.partition("/")[0]:
            return word
        known = separator and scheme in ("s3", "file", "memory", "http", "https")
        return f"{scheme}://…" if known else "…"

    return _WORD.sub(shorter, text)


def error_text(error: S3CacheError) -> str:
    """What is wrong, and where to read on, unless it says so itself."""
    from s3cache._pages import command, pointer
    from s3cache._problems import code_of

    return str(error) if command() in str(error) else f"{error} {pointer(code_of(error))}"


def size_text(size: float) -> str:
    """A size for people, as in ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age(seconds: float) -> str:
    """How long ago, for people, as in ``3 h``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _jsonable(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _jsonable(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(part) for part in value]
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


# -- what a store fails to do, shown at a terminal: it may be tried again for two minutes


class _RetryHandler(logging.Handler):
    """Says what is logged on standard error, above a bar if one is drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"s3cache: {redacted(record.getMessage())}\n")


def show_retries() -> None:
    """Print each request that failed and is tried again, from now on."""
    logger = logging.getLogger("s3cache.storage")
    if not any(isinstance(each, _RetryHandler) for each in logger.handlers):
        logger.addHandler(_RetryHandler())
        logger.setLevel(logging.INFO)
