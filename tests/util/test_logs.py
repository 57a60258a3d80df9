"""Logs: each logger is documented, and a warning has the name of s3cache only once."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from s3cache.util.logs import Topic
from tests.support.pages import ROOT
from tests.support.scripts import python


def test_each_logger_is_documented() -> None:
    page = (ROOT / "docs" / "explaining-misses.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(s3cache[.\w]*)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(
        ["s3cache", "s3cache.recall", *(f"s3cache.{topic}" for topic in get_args(Topic))]
    )


PROGRAM = """
import logging, sys
from s3cache.util.logs import logger_of
{setup}
logger_of("storage").info("quiet")
logger_of("storage").warning("the disk is full")
logger_of().warning("not enabled")
"""


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        ("", ["s3cache: the disk is full", "s3cache: not enabled"]),
        ("logging.getLogger('s3cache').setLevel('ERROR')", []),
        ("logging.getLogger('s3cache').addHandler(logging.NullHandler())", []),
        (
            "logging.getLogger('s3cache.storage').addHandler(logging.NullHandler())",
            ["s3cache: not enabled"],
        ),
        (
            "logging.basicConfig(format='%(name)s: %(message)s')",
            ["s3cache.storage: the disk is full", "s3cache: not enabled"],
        ),
        (
            "logging.basicConfig()\nlogging.getLogger('s3cache').propagate = False",
            ["s3cache: the disk is full", "s3cache: not enabled"],
        ),
        ("sys.stderr = None", []),
    ],
)
def test_a_warning_names_s3cache_once_however_logging_is_set_up(
    setup: str, expected: list[str]
) -> None:
    done = python("-c", PROGRAM.format(setup=setup))
    assert (done.returncode, done.stderr.splitlines()) == (0, expected)
