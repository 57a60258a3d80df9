"""Text for people: nouns with numbers, foreign text made fit to be shown, sections of the docs.

A message that names a code of a reason, bypass, error or check ends with the command that shows
the documentation's section on it: :func:`pointer`. The text is read from ``docs/``: a wheel has
the pages beside the package, where ``infra/dist/pages.py`` puts them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from s3cache.errors import printable, printable_lines

__all__ = [
    "PAGES",
    "Kind",
    "Section",
    "command",
    "counted",
    "escape",
    "footer",
    "known",
    "may_be_a_key",
    "pointer",
    "printable",
    "printable_lines",
    "sections",
    "sections_on",
]

# 32 bytes, as base64 has them. A path has slashes too, but does not end like that.
_KEY = re.compile(r"[A-Za-z0-9+=]{40,}|[A-Za-z0-9+/]{41,}=")
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


def escape(words: str) -> str:
    """Return ``words`` as HTML shows them, and nothing that a browser would obey."""
    from html import escape as escape_html

    return escape_html(printable_lines(words))


# -- sections of the documentation

#: Why a lookup missed, or a save was refused; why a graph was bypassed; a class of error; what
#: ``s3cache doctor`` looks at.
Kind: TypeAlias = Literal["reason", "bypass", "error", "check"]

#: What the sections of a page are about, and how their headings begin.
PAGES: dict[str, tuple[Kind, str]] = {
    "reasons.md": ("reason", "### "),
    "bypasses.md": ("bypass", "### "),
    "errors.md": ("error", "## "),
    "doctor.md": ("check", "### "),
}

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PLACES = (os.path.join(_HERE, "_docs"), os.path.join(os.path.dirname(_HERE), "docs"))
_HEADING_OR_CODE = re.compile(r"^(#+ )(.*)$|^```[\s\S]*?^```", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the documentation, on one code: its page's title, and its text in Markdown.

    Links in the text lead from ``docs/``; ``page`` is in the repository, with an anchor.
    """

    code: str
    kind: Kind
    title: str
    text: str
    page: str

    def without_links(self) -> tuple[str, list[str], list[str]]:
        """Return the text without its links, the codes that they lead to, and other places."""
        there = {section.page: section.code for section in sections()}
        here = self.page.partition("#")[0]
        targets = dict.fromkeys(
            here + target if target[0] == "#" else posixpath.normpath(f"docs/{target}")
            for _, target in _LINK.findall(self.text)
        )
        codes = dict.fromkeys(there[each] for each in targets if each in there)
        codes.pop(self.code, None)
        places = [each for each in targets if each not in there]
        return _LINK.sub(r"\1", self.text), [*codes], places


# -- pointing to them


def command(*codes: str) -> str:
    """Return the command that shows the sections on ``codes``: ``s3cache explain untrusted``."""
    return " ".join(("s3cache explain", *codes))


def pointer(*codes: str) -> str:
    """Return :func:`command` as the end of a sentence: ``(s3cache explain untrusted)``."""
    return f"({command(*codes)})"


def footer(codes: Iterable[str]) -> str:
    """Return the last line of a report on ``codes``; ``""`` where none of them has a section."""
    found = known(codes)
    return f"read on: {command(*found)}" if found else ""


def known(codes: Iterable[str]) -> list[str]:
    """Return those of ``codes`` that have a section, each once."""
    there = {section.code for section in sections()}
    return [code for code in dict.fromkeys(codes) if code in there]


# -- reading them


def sections_on(word: str) -> list[Section]:
    """Return the sections on a code, in any capitalization; a code may be of two kinds."""
    return [each for each in sections() if each.code.casefold() == word.casefold()]


@functools.cache
def sections() -> tuple[Section, ...]:
    """Return all sections, in the order of their pages; none where there are no pages."""
    return tuple(
        section
        for name, (kind, mark) in PAGES.items()
        for section in _sections_of(_text_of(name), name, kind, mark)
    )


def _text_of(name: str) -> str:
    for place in _PLACES:
        with (
            contextlib.suppress(OSError),
            open(os.path.join(place, name), encoding="utf-8") as file,
        ):
            return file.read()
    return ""


def _sections_of(page: str, name: str, kind: Kind, mark: str) -> Iterator[Section]:
    """Yield sections with a heading that begins with ``mark``; the next one as high ends it."""
    headings = [found for found in _HEADING_OR_CODE.finditer(page) if found[1]]
    for number, heading in enumerate(headings):
        if heading[1] == mark:
            ends = (each.start() for each in headings[number + 1 :] if len(each[1]) <= len(mark))
            text = page[heading.end() : next(ends, len(page))].strip()
            anchor = heading[2].lower()
            yield Section(heading[2], kind, headings[0][2], text, f"docs/{name}#{anchor}")
