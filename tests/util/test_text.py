"""Messages name s3cache once, and lead to the section about their code, which exists."""

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
from s3cache.seam import features, reasons
from s3cache.trust import Cause
from s3cache.util.logs import Topic
from s3cache.util.text import command, footer, pointer, sections, sections_on
from tests.support.pages import ROOT
from tests.support.scripts import python

SOURCES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "s3cache").rglob("*.py"))
}
MEMBERS = [
    *(("reason", str(reason)) for reason in reasons()),
    *(("bypass", code) for code in get_args(Code)),
    *(("bypass", code) for feature in features() for code in feature.bypasses),
    *((feature.name, code) for feature in features() for code in feature.codes),
    *(("error", name) for name in errors.__all__),
    *(("check", name) for name in get_args(Name)),
]


@pytest.mark.needs
def test_exactly_the_reasons_codes_and_errors_have_a_section() -> None:
    assert sorted((each.kind, each.code) for each in sections()) == sorted(MEMBERS)
    for section in sections():
        assert section in sections_on(section.code)
        assert len(section.text.split()) >= 8
        page, _, anchor = section.page.partition("#")
        assert f"# {section.title}\n" in (ROOT / page).read_text(encoding="utf-8")
        assert anchor == section.code.lower()


@pytest.mark.needs("recall")
def test_a_code_is_found_in_any_capitalization() -> None:
    assert [each.code for each in sections_on("configerror")] == ["ConfigError"]
    assert [each.kind for each in sections_on("ERROR")] == ["reason", "bypass", "recall"]
    assert sections_on("nonsense") == []


def test_no_code_could_be_a_prefix_of_a_key() -> None:
    """The command distinguishes codes and keys by this."""
    assert [code for _, code in MEMBERS if re.fullmatch("[a-z]?[0-9a-f]*", code)] == []


def test_causes_of_distrust_are_documented() -> None:
    (section,) = sections_on("untrusted")
    assert re.findall(r"^\| `([\w-]+)` \|", section.text, re.MULTILINE) == list(get_args(Cause))


def test_a_reason_that_blocks_the_second_level_is_documented_so() -> None:
    """The page promises to name the reasons for which FX graphs are not cached either."""
    at_no_level = {code for code in get_args(Code) if BypassReason(code, "").blocks_fx_level}
    bypasses = [each for each in sections() if each.kind == "bypass"]
    marked = {each.code for each in bypasses if "second level either" in each.text}
    assert marked == at_no_level


# -- messages


def test_a_footer_names_each_code_with_a_section_once() -> None:
    assert footer(["guard", "\x1b[2J", "custom-operator", "", "guard"]) == (
        "read on: s3cache explain guard custom-operator"
    )
    assert footer(["of another release"]) == footer([]) == ""
    assert pointer("guard") == f"({command('guard')})" == "(s3cache explain guard)"


# Functions that take codes, and the position of the first code.
_CALLS = {"pointer": 0, "command": 0, "Check": 4}
_POINTING = re.compile(rf"\b(?:{'|'.join(_CALLS)})\(|s3cache explain")


def pointed_to(source: str) -> Iterator[str]:
    """Yield the codes that are written where a message is made, but not computed ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            begin = _CALLS.get(node.func.id) if isinstance(node.func, ast.Name) else None
            codes = [] if begin is None else node.args[begin:]
            yield from (ast.literal_eval(each) for each in codes if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"s3cache explain ([a-z][\w-]+)", node.value)


def test_each_message_leads_to_a_section() -> None:
    documented = {section.code for section in sections()}
    pointing = {file: source for file, source in SOURCES.items() if _POINTING.search(source)}
    named = {file: found for file, source in pointing.items() if (found := {*pointed_to(source)})}
    assert {file: found - documented for file, found in named.items() if found - documented} == {}
    assert {"machine", "untrusted", "UnsupportedTorchError"} <= {*chain(*named.values())}


def test_each_logger_is_documented() -> None:
    page = (ROOT / "docs" / "explaining-misses.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(s3cache[.\w]*)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(
        [
            "s3cache",
            "s3cache.ranks",
            "s3cache.recall",
            *(f"s3cache.{topic}" for topic in get_args(Topic)),
        ]
    )


PROGRAM = """
import logging, os, sys
from s3cache.util.logs import logger_of
for setup in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(setup)
        logger_of("storage").info("quiet")
        logger_of("storage").warning("the disk is full")
        logger_of().warning("not enabled")
        os._exit(0)
    print(os.waitpid(child, 0)[1], file=sys.stderr)
"""
FULL, OFF = "s3cache: the disk is full", "s3cache: not enabled"
SETUPS = {
    "": [FULL, OFF],
    "logging.getLogger('s3cache').setLevel('ERROR')": [],
    "logging.getLogger('s3cache').addHandler(logging.NullHandler())": [],
    "logging.getLogger('s3cache.storage').addHandler(logging.NullHandler())": [OFF],
    "logging.basicConfig(format='%(name)s: %(message)s')": [FULL.replace(":", ".storage:"), OFF],
    "logging.basicConfig()\nlogging.getLogger('s3cache').propagate = False": [FULL, OFF],
    "sys.stderr = None": [],
}


def test_a_warning_names_s3cache_once_however_logging_is_set_up() -> None:
    done = python("-c", PROGRAM, *SETUPS)
    expected = [line for lines in SETUPS.values() for line in (*lines, "0")]
    assert done.stderr.splitlines() == expected
