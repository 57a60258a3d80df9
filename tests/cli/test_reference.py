"""``docs/commands.md`` is what the commands say of themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from infra.docs.commands import reference

if TYPE_CHECKING:
    from tests.cli.commands import Call

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"


def test_the_page_is_up_to_date() -> None:
    """If not: ``make commands``."""
    assert PAGE.read_text(encoding="utf-8") == reference()


def test_the_page_has_a_section_for_each_command_that_help_lists(call: Call) -> None:
    listed = re.findall(r"^\W*(\w+)  ", call("--help").out.partition("Commands")[2], re.MULTILINE)
    sections = re.findall(r"^## s3cache (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sections
    assert sections == listed


def test_every_option_is_said_in_help_too(call: Call) -> None:
    for section in reference().split("\n## s3cache ")[2:]:
        shown = call(section.split()[0], "--help").out
        for option in re.findall(r"--[a-z][a-z-]*", section.partition("|---|---|")[2]):
            assert option in shown
