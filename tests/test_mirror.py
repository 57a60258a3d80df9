"""What tests may import: what ``tests/README.md`` says of it holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"

# Folders that may import the private modules of a package of another name, which they test.
_ALSO_OF = {"perturb": "graph"}


@cache
def files() -> dict[str, ast.Module]:
    return {
        path.relative_to(TESTS).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(TESTS.rglob("*.py"))
    }


def imported(source: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of each import; without a name the whole module."""
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def folder(file: str) -> str:
    return file.rpartition("/")[0]


def strange_imports(file: str, source: ast.Module) -> Iterator[str]:
    """Test modules, and modules of another suite: what two need belongs to ``tests/support``."""
    own = folder(file).replace("/", ".")
    for module, name in imported(source):
        if module.partition(".")[0] != "tests":
            continue
        place = f"{module}.{name}".split(".")[1:]
        here = place[0] in ("support", own.partition(".")[0])
        if not here or any(part.startswith("test_") for part in place):
            yield f"{module} {name}"


def test_nothing_is_imported_from_a_test_module_or_another_suite() -> None:
    found = {file: [*strange_imports(file, source)] for file, source in files().items()}
    assert {file: modules for file, modules in found.items() if modules} == {}


def private_imports(file: str, source: ast.Module) -> Iterator[str]:
    """Modules private to a package, unless it is the one that is tested here."""
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


def test_private_modules_are_imported_by_the_tests_of_their_package_only() -> None:
    found = {file: [*private_imports(file, source)] for file, source in files().items()}
    assert {file: modules for file, modules in found.items() if modules} == {}
