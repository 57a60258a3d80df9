"""Imports of tests obey the rules in ``tests/README.md``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"

# Folders that test a package of another name, and may import its private modules.
_ALSO_OF = {"equal": "graph", "equal/changes": "graph"}


@cache
def files() -> dict[str, ast.Module]:
    return {
        path.relative_to(TESTS).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(TESTS.rglob("*.py"))
    }


def imported(source: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import; the name of a whole module is empty."""
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def folder(file: str) -> str:
    return file.rpartition("/")[0]


def forbidden_imports(file: str, source: ast.Module) -> Iterator[str]:
    """Yield imports of test modules and other suites: shared code belongs elsewhere."""
    own = folder(file).replace("/", ".")
    for module, name in imported(source):
        if module.partition(".")[0] != "tests":
            continue
        place = f"{module}.{name}".split(".")[1:]
        here = place[0] in ("support", "equal", own.partition(".")[0])
        if not here or any(part.startswith("test_") for part in place):
            yield f"{module} {name}"


def test_tests_do_not_import_test_modules_or_other_suites() -> None:
    found = {file: [*forbidden_imports(file, source)] for file, source in files().items()}
    assert {file: modules for file, modules in found.items() if modules} == {}


def private_imports(file: str, source: ast.Module) -> Iterator[str]:
    """Yield imports of private modules, except those of the package under test."""
    own = folder(file)
    own = _ALSO_OF.get(own, own)
    for module, name in imported(source):
        parts = f"{module}.{name}".strip(".").split(".")
        if parts[0] != "s3cache":
            continue
        package = "/".join(part for part in parts[1:-1] if not part.startswith("_"))
        private = [part for part in parts[2:] if re.match("_[a-z]", part)]
        if private and package != own:
            yield ".".join(parts)


def test_only_tests_of_a_package_import_its_private_modules() -> None:
    found = {file: [*private_imports(file, source)] for file, source in files().items()}
    assert {file: modules for file, modules in found.items() if modules} == {}
