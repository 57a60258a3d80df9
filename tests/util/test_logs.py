"""What is logged: by loggers that people know of, without the name of s3cache twice."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from s3cache.util.logs import Topic
from tests.support.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted((ROOT / "s3cache").rglob("*.py")), ROOT / "_s3cache_autoload.py"]
LEVELS = {
    "debug": "DEBUG",
    "info": "INFO",
    **dict.fromkeys(("warning", "error", "exception", "critical"), "WARNING"),
}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Each call that logs, with the logger's name and the level; one of both if it has a choice."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        (target,) = node.targets[:1]
        pairs = (
            zip(target.elts, node.value.elts, strict=True)
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            else [(target, node.value)]
        )
        for to, value in pairs:
            if isinstance(to, ast.Name) and (name := logger_named(value)):
                names[to.id] = name
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of = node.func.value
        name = logger_named(of) or (names.get(of.id, "") if isinstance(of, ast.Name) else "")
        if name and (node.func.attr in LEVELS or node.func.attr == "log"):
            yield node, name, LEVELS.get(node.func.attr, "")


def logger_named(node: ast.expr) -> str:
    """The name of the logger that ``node`` gets, if it gets one."""
    if not (isinstance(node, ast.Call) and not node.keywords):
        return ""
    texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
    function = ast.unparse(node.func)
    if function == "logger_of":
        return ".".join(["s3cache", *map(str, texts)])
    return str(texts[0]) if function == "logging.getLogger" and texts else ""


CALLS = [
    (path.name, *each)
    for path in SOURCES
    for each in calls(ast.parse(path.read_text(encoding="utf-8")))
]


def test_no_message_repeats_the_name_of_s3cache() -> None:
    """Of the command it may tell, in backquotes."""
    assert len(CALLS) > 30
    for file, call, _, _ in CALLS:
        for node in ast.walk(call):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = re.sub(r"`s3cache [^`]+`", "", node.value)
                assert "s3cache" not in text, (file, call.lineno)


def test_each_logger_is_documented_with_its_levels() -> None:
    page = (ROOT / "docs" / "explaining-misses.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(s3cache[.\w]*)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    documented = {
        (name, level)
        for name, *cells in rows
        for level, cell in zip(("WARNING", "INFO", "DEBUG"), cells, strict=True)
        if cell.strip()
    }
    logged = {(name, level) for _, _, name, level in CALLS if level}
    # One is logged at WARNING first and at INFO then; one of the loggers is chosen at run time.
    logged |= {("s3cache.bypasses", "WARNING"), ("s3cache.trust", "WARNING")}
    assert documented == logged
    assert {name for name, _ in logged} == {"s3cache", *(f"s3cache.{t}" for t in get_args(Topic))}


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
        ("logging.lastResort = None", []),
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
def test_a_warning_says_once_who_warns_however_logging_is_set_up(
    setup: str, expected: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setup=setup)],
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert (done.returncode, done.stderr.splitlines()) == (0, expected)
