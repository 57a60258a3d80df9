"""``s3cache version``."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import s3cache

if TYPE_CHECKING:
    from tests.cli.commands import Call


def test_it_names_what_a_bug_report_needs(call: Call) -> None:
    done = call("version", "--json")
    assert done.code == 0
    found = done.json
    assert found["s3cache"] == s3cache.__version__
    assert platform.python_version() in found["python"]
    assert {"torch", "botocore", "platform", "libc", "zstandard"} <= set(found)
    assert found["rich"][0].isdigit()


def test_people_get_one_line_for_each(call: Call) -> None:
    done = call("version")
    assert len(done.out.splitlines()) == len(call("version", "--json").json)
    assert ["s3cache", s3cache.__version__] in [line.split() for line in done.out.splitlines()]
