"""Each reason, code and error has its section, and no section is about anything else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from s3cache import errors
from s3cache.graph import Code
from s3cache.stats import Reason
from s3cache.trust import Cause

DOCS = Path(__file__).resolve().parents[1] / "docs"
SECTION = re.compile(
    r"^(?P<level>##+) (?P<title>\S+)\n\n(?P<text>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL
)
# Title of the sections on each page, and how deep they lie.
PAGES: dict[str, tuple[str, set[str]]] = {
    "reasons.md": ("###", {str(reason) for reason in Reason}),
    "bypasses.md": ("###", set(get_args(Code))),
    "errors.md": ("##", set(errors.__all__)),
}


def sections(page: str) -> dict[str, str]:
    level, _ = PAGES[page]
    text = (DOCS / page).read_text(encoding="utf-8")
    found = [match for match in SECTION.finditer(text) if match["level"] == level]
    titles = [match["title"] for match in found]
    assert len(titles) == len(set(titles)), "a link to one of two equal titles finds the first"
    return {match["title"]: match["text"] for match in found}


@pytest.mark.parametrize("page", PAGES)
def test_each_has_a_section_and_nothing_else_has(page: str) -> None:
    _, named = PAGES[page]
    assert sections(page).keys() == named


@pytest.mark.parametrize("page", PAGES)
def test_no_section_is_empty(page: str) -> None:
    assert [title for title, text in sections(page).items() if len(text.split()) < 8] == []


def test_causes_of_distrust_are_told() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", sections("reasons.md")["untrusted"], re.MULTILINE)
    assert rows == list(get_args(Cause))


def test_what_cannot_be_shared_in_halves_says_so() -> None:
    """The page promises that it tells where not even halves of a graph are cached."""
    from s3cache.graph import Unsafe

    in_no_form = {code for code in get_args(Code) if Unsafe(code, "").in_any_form}
    told = {title for title, text in sections("bypasses.md").items() if "in halves either" in text}
    assert told == in_no_form
