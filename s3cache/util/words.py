"""Numbers with their nouns; foreign text made fit to be shown, in a line or as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from s3cache.errors import printable, printable_lines

__all__ = [
    "code",
    "counted",
    "escape",
    "may_be_a_key",
    "printable",
    "printable_lines",
    "table",
    "text",
]

# 32 bytes, as base64 has them.
_KEY = re.compile(r"[A-Za-z0-9+=]{40,}")
_KEY_BYTES = 32


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 entry`` or ``2 entries``; the plural gets an s unless ``plural`` is given."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def may_be_a_key(text: str) -> bool:
    """Return whether ``text`` is or contains what looks like a key, which no message repeats."""
    if _KEY.search(text):
        return True
    import base64

    try:
        return len(base64.b64decode(text.strip(), validate=True)) >= _KEY_BYTES
    except ValueError:
        return False


# -- as notebooks show it

_STYLE = "text-align: left; vertical-align: top"
_CODE = "margin: 0; white-space: pre-wrap; text-align: left"


def escape(words: str) -> str:
    """Return ``words`` as HTML shows them, and nothing that a browser would obey."""
    from html import escape as escape_html

    return escape_html(printable_lines(words))


def text(words: object) -> str:
    """Return ``words`` as a notebook shows them, line for line."""
    return "<br>".join(escape(line) for line in str(words).splitlines())


def code(lines: str) -> str:
    """Return code, or something to be pasted, as a notebook shows it."""
    return f'<pre style="{_CODE}">{escape(lines)}</pre>' if lines else ""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a line with a table below it, as a notebook shows them.

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
