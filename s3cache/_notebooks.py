"""What notebooks show: a line and a table, in HTML that believes nothing of what it is given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape as escape_html

from s3cache._words import printable_lines

__all__ = ["code", "escape", "table", "text"]

_STYLE = "text-align: left; vertical-align: top"
_CODE = "margin: 0; white-space: pre-wrap; text-align: left"


def escape(words: str) -> str:
    """``words`` as HTML shows them, and nothing that a browser would obey."""
    return escape_html(printable_lines(words))


def text(words: object) -> str:
    """``words`` as they are, line for line."""
    return "<br>".join(escape(line) for line in str(words).splitlines())


def code(lines: str) -> str:
    """Something to be read as code, or to be pasted."""
    return f'<pre style="{_CODE}">{escape(lines)}</pre>' if lines else ""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table below a line.

    Args:
        title, columns: plain text.
        rows: of cells that :func:`text` and :func:`code` have made.
    """
    head = "".join(f'<th style="{_STYLE}">{escape(name)}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_STYLE}">{cell}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    made = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""
    return f"<div><p>{escape(title)}</p>{made}</div>"
