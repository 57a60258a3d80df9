"""Imports of tests obey the rules in ``tests/README.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent

# Folders that test a package of another name, and may import its private modules.
_ALSO_OF = {"equal": "graph", "equal/changes": "graph"}
# Imports anywhere, also those of programs in texts; parsing all tests would take seconds.
_IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|.+)|import ([\w.]+))", re.MULTILINE)


def imports(package: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the folder of a file and the parts of a name below ``package``, for each import."""
    for path in TESTS.rglob("*.py"):
        for module, names, whole in _IMPORT.findall(path.read_text(encoding="utf-8")):
            for name in re.findall(r"(\w+)(?: as \w+)?(?:,|\)|\s|$)", names) or [""]:
                first, *parts = f"{module or whole}.{name}".strip(".").split(".")
                if first == package:
                    yield path.parent.relative_to(TESTS).as_posix(), parts


def test_tests_do_not_import_test_modules_or_other_suites() -> None:
    """Shared code is in ``support/`` and ``equal/``."""
    shared = ("support", "equal")
    for folder, place in imports("tests"):
        assert place[0] in (*shared, folder.partition("/")[0]), (folder, place)
        assert not any(part.startswith("test_") for part in place), (folder, place)


def test_only_tests_of_a_package_import_its_private_modules() -> None:
    for folder, parts in imports("s3cache"):
        package = "/".join(part for part in parts[:-1] if not part.startswith("_"))
        if any(re.match("_[a-z]", part) for part in parts[1:]):
            assert package == _ALSO_OF.get(folder, folder), (folder, parts)
