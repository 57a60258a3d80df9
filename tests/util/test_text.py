"""Each message that has a code leads to the section on it, and the section is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from typing import get_args

import pytest

from s3cache import errors
from s3cache.graph import BypassReason, Code
from s3cache.insight import Name
from s3cache.stats import FrameCode, Reason
from s3cache.trust import Cause
from s3cache.util.text import command, footer, pointer, sections, sections_on
from tests.support.pages import ROOT

SOURCES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "s3cache").rglob("*.py"))
}
MEMBERS = [
    *(("reason", str(reason)) for reason in Reason),
    *(("bypass", code) for code in get_args(Code)),
    *(("frame", code) for code in get_args(FrameCode)),
    *(("error", name) for name in errors.__all__),
    *(("check", name) for name in get_args(Name)),
]


@pytest.mark.parametrize(("kind", "code"), MEMBERS)
def test_each_reason_code_and_error_has_a_section(kind: str, code: str) -> None:
    (section,) = (each for each in sections_on(code) if each.code == code and each.kind == kind)
    assert len(section.text.split()) >= 8
    page, _, anchor = section.page.partition("#")
    assert f"# {section.title}\n" in (ROOT / page).read_text(encoding="utf-8")
    assert anchor == code.lower()


def test_nothing_else_has_one() -> None:
    assert sorted((each.kind, each.code) for each in sections()) == sorted(MEMBERS)


def test_a_word_is_found_however_it_is_capitalized() -> None:
    assert [each.code for each in sections_on("configerror")] == ["ConfigError"]
    assert [each.kind for each in sections_on("ERROR")] == ["reason", "bypass", "frame"]
    assert sections_on("nonsense") == []


def test_no_code_could_be_the_beginning_of_a_key() -> None:
    """That is how the command tells them apart."""
    assert [code for _, code in MEMBERS if re.fullmatch("[a-z]?[0-9a-f]*", code)] == []


def test_causes_of_distrust_are_documented() -> None:
    (section,) = sections_on("untrusted")
    assert re.findall(r"^\| `([\w-]+)` \|", section.text, re.MULTILINE) == list(get_args(Cause))


def test_what_cannot_be_shared_in_halves_says_so() -> None:
    """The page promises that it says where not even FX graphs are cached."""
    in_no_form = {code for code in get_args(Code) if BypassReason(code, "").blocks_fx_level}
    bypasses = [each for each in sections() if each.kind == "bypass"]
    marked = {each.code for each in bypasses if "second level either" in each.text}
    assert marked == in_no_form


# -- messages


def test_a_footer_names_what_has_a_section_once() -> None:
    assert footer(["guard", "\x1b[2J", "custom-operator", "", "guard"]) == (
        "read on: s3cache explain guard custom-operator"
    )
    assert footer(["of another release"]) == footer([]) == ""
    assert pointer("guard") == f"({command('guard')})" == "(s3cache explain guard)"


# What takes codes, and from which argument on.
_CALLS = {"pointer": 0, "command": 0, "Check": 4}


def pointed_to(source: str) -> Iterator[str]:
    """The codes that are named where a message is made; those that are computed are left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            begin = _CALLS.get(node.func.id) if isinstance(node.func, ast.Name) else None
            codes = [] if begin is None else node.args[begin:]
            yield from (ast.literal_eval(each) for each in codes if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"s3cache explain ([a-z][\w-]+)", node.value)


def test_each_message_leads_to_a_section() -> None:
    there = {section.code for section in sections()}
    named = {file: found for file, source in SOURCES.items() if (found := {*pointed_to(source)})}
    assert {file: found - there for file, found in named.items() if found - there} == {}
    assert {"machine", "untrusted", "UnsupportedTorchError"} <= {*chain(*named.values())}
