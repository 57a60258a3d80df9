"""Show results: tables for people, JSON for programs, and nothing that could be a secret."""

from __future__ import annotations

import json as json_of
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

import typer

from s3cache.util.text import printable, printable_lines

_WORD = re.compile(r"[^\s'\"()<>]*(?:://|@)[^\s'\"()<>]*")
_SECRET = re.compile(r"secret|passw|token|access_?key|credential|signature", re.IGNORECASE)
_SCHEMES = ("s3", "file", "memory", "http", "https")


class Output:
    """Standard output of a command: text, or with ``--json`` JSON and nothing else."""

    def __init__(
        self,
        json: bool = typer.Option(False, "--json", help="JSON on standard output, for programs."),
    ) -> None:
        self.json = json

    def record(self, value: object) -> None:
        """Write one JSON value on a line of its own."""
        sys.stdout.write(json_of.dumps(_jsonable(value), ensure_ascii=True) + "\n")

    def line(self, text: str) -> None:
        """Write one line, with whatever a terminal would obey escaped."""
        sys.stdout.write(f"{printable(text)}\n")

    def text(self, text: str) -> None:
        """Write several lines of our own; foreign text in them has gone through `printable`."""
        sys.stdout.write(f"{printable_lines(text)}\n")

    def note(self, text: str) -> None:
        """Write a line to standard error; with ``--json`` write nothing."""
        if not self.json:
            sys.stderr.write(f"{printable(text)}\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write rows with their cells one below the other, below the names of the columns if any.

        Columns with names that begin with ``>`` are set to the right.
        """
        head = [[name.lstrip(">") for name in columns]] if columns else []
        cells = [[printable(str(cell)) for cell in row] for row in (*head, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        sides = [">" if name.startswith(">") else "<" for name in columns] or ["<"] * len(widths)
        for row in cells:
            shown = (
                f"{cell:{side}{width}}"
                for cell, side, width in zip(row, sides, widths, strict=True)
            )
            sys.stdout.write("  ".join(shown).rstrip() + "\n")

    @contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Draw a bar on standard error, if that is a terminal; yield what advances it."""
        if self.json or not sys.stderr.isatty():
            yield lambda _: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)


def redacted(text: str) -> str:
    """Return ``text`` without the passwords of URLs, however the URLs are misspelt."""

    def shorter(match: re.Match[str]) -> str:
        word = match[0]
        scheme, separator, rest = word.partition("://")
        before, _, query = rest.partition("?")
        if "@" not in word and not _SECRET.search(query) and ":" not in before.partition("/")[0]:
            return word
        return f"{scheme}://…" if separator and scheme in _SCHEMES else "…"

    return _WORD.sub(shorter, text)


def size_text(size: float) -> str:
    """Return a size for people, as in ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def age(seconds: float) -> str:
    """Return how long ago something was, for people, as in ``3 h``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
