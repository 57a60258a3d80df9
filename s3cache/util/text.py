"""Text for people: nouns with numbers, escaped foreign text, sections of the docs.

A message with the code of a reason, bypass, frame, error or check ends with the command that shows
its section in the documentation: :func:`pointer`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from s3cache.errors import printable as printable
from s3cache.errors import printable_lines as printable_lines

# 32 bytes in base64. A path may have slashes too, but does not end in this way.
_KEY = re.compile(r"[A-Za-z0-9+=]{40,}|[A-Za-z0-9+/]{41,}=")
_KEY_BYTES = 32


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 entry`` or ``2 entries``; without ``plural``, add an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def may_be_a_key(text: str) -> bool:
    """Return whether ``text`` contains something like a key, which messages must not repeat."""
    if _KEY.search(text):
        return True
    import base64

    try:
        return len(base64.b64decode(text.strip(), validate=True)) >= _KEY_BYTES
    except ValueError:
        return False


def escape(words: str) -> str:
    """Escape ``words`` for HTML, including everything that a browser interprets."""
    from html import escape as escape_html

    return escape_html(printable_lines(words))


_WORD = re.compile(r"[^\s'\"()<>]*(?:://|@)[^\s'\"()<>]*")
_SECRET = re.compile(r"secret|passw|token|access_?key|credential|signature", re.IGNORECASE)
_SCHEMES = ("s3", "file", "memory", "http", "https")


def redacted(text: str) -> str:
    """Return ``text`` without the passwords in URLs, even if the URLs are misspelt."""

    def shorter(match: re.Match[str]) -> str:
        word = match[0]
        scheme, separator, rest = word.partition("://")
        before, _, query = rest.partition("?")
        if "@" not in word and not _SECRET.search(query) and ":" not in before.partition("/")[0]:
            return word
        return f"{scheme}://…" if separator and scheme in _SCHEMES else "…"

    return _WORD.sub(shorter, text)


# -- sections of the documentation

#: The kind of codes on each page, and the prefix of their headings: why a lookup missed or a save
#: was refused, why a graph was bypassed, a class of error, a check of ``s3cache doctor``. Features
#: add theirs.
PAGES: dict[str, tuple[str, str]] = {
    "reasons.md": ("reason", "### "),
    "bypasses.md": ("bypass", "### "),
    "errors.md": ("error", "## "),
    "doctor.md": ("check", "### "),
}

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "_docs", _PACKAGE.parent / "docs")
_HEADING_OR_CODE = re.compile(r"^(#+ )(.*)$|^```[\s\S]*?^```", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the documentation on a code: its page's title, and its text in Markdown.

    Links in the text are replaced by their words; ``page`` is in the repository, with an anchor.
    """

    code: str
    kind: str
    title: str
    text: str
    page: str


def command(*codes: str) -> str:
    """Return the command that shows the sections on ``codes``: ``s3cache explain untrusted``."""
    return " ".join(("s3cache explain", *codes))


def pointer(*codes: str) -> str:
    """Return :func:`command` as the end of a sentence: ``(s3cache explain untrusted)``."""
    return f"({command(*codes)})"


def footer(codes: Iterable[str]) -> str:
    """Return the last line of a report on ``codes``; ``""`` if none of them has a section."""
    explained = [code for code in dict.fromkeys(codes) if sections_on(code)]
    return f"read on: {command(*explained)}" if explained else ""


def sections_on(word: str) -> list[Section]:
    """Return the sections on a code, in any capitalization; a code may be of two kinds."""
    return [each for each in sections() if each.code.casefold() == word.casefold()]


@functools.cache
def sections() -> tuple[Section, ...]:
    """Return all sections, in the order of their pages; none if there are no pages.

    In a wheel, the pages are beside the package, written by ``infra/dist/pages.py``. A section ends
    at the next heading that is not below its own.
    """
    explained = []
    for name, (kind, mark) in PAGES.items():
        there = [place / name for place in _PLACES if (place / name).is_file()]
        page = there[0].read_text(encoding="utf-8") if there else ""
        headings = [heading for heading in _HEADING_OR_CODE.finditer(page) if heading[1]]
        for number, heading in enumerate(headings):
            if heading[1] == mark:
                after = (other for other in headings[number + 1 :] if len(other[1]) <= len(mark))
                end = next((other.start() for other in after), len(page))
                text = _LINK.sub(r"\1", page[heading.end() : end].strip())
                anchor = f"docs/{name}#{heading[2].lower()}"
                explained.append(Section(heading[2], kind, headings[0][2], text, anchor))
    return tuple(explained)
