"""Which part of s3cache may import which: what CONTRIBUTING says of rooms holds for the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_TOP = ("__init__", "__main__")  # they stand on everything


@dataclass(frozen=True)
class Import:
    """``importer`` imports ``name`` from ``module``; modules are named within s3cache."""

    importer: str
    module: str
    name: str
    at_once: bool  # when it is imported itself, and not when a function runs

    @property
    def rooms(self) -> tuple[str, str]:
        return self.importer.partition(".")[0], self.module.partition(".")[0]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "s3cache").with_suffix("").parts)


#: Every module by its name within s3cache, and that of its file if it is a package.
FILES = {_name(path): path for path in sorted((ROOT / "s3cache").rglob("*.py"))}


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


def imports(source: ast.Module, importer: str) -> Iterator[Import]:
    for node, at_once in _statements(source.body, at_once=True):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "s3cache":
            inside = (node.module or "").partition(".")[2]
            for alias in node.names:
                whole = f"{inside}.{alias.name}".strip(".")
                module = whole if _is_module(whole) else inside or "__init__"
                yield Import(importer, module, alias.name, at_once)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("s3cache."):
                    yield Import(importer, alias.name.partition(".")[2], "", at_once)


def _is_module(name: str) -> bool:
    return name in FILES or f"{name}.__init__" in FILES


def _statements(body: list[ast.stmt], *, at_once: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for node in body:
        yield node, at_once
        lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, part, []), at_once=at_once and not lazy)
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body, at_once=at_once and not lazy)


@cache
def all_imports() -> list[Import]:
    return [each for name in FILES for each in imports(parsed(name), name)]


def rooms_in_order() -> list[str]:
    """The rooms of CONTRIBUTING's table, from the ground up."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`s3cache/[^|]+)\|", page, re.MULTILINE)
    return [room for cell in cells for room in re.findall(r"`s3cache/(\w+)(?:/|\.py)`", cell)]


def test_every_room_has_its_place() -> None:
    there = {name.partition(".")[0] for name in FILES} - {*_TOP}
    assert sorted(there) == sorted(rooms_in_order())


def test_imports_point_downward_only() -> None:
    """A room imports rooms that are above it in the table, which begins with the ground."""
    order = [*rooms_in_order(), *_TOP]
    upward = [
        each
        for each in all_imports()
        if each.rooms[0] != each.rooms[1]
        and order.index(each.rooms[0]) < order.index(each.rooms[1])
    ]
    assert upward == []


def test_no_module_imports_what_is_private_to_another_package() -> None:
    """Neither a module nor a name. What a package is for, it exports."""
    private = {
        (each.rooms[0], each.module)
        for each in all_imports()
        if each.rooms[0] != each.rooms[1]
        and (
            any(part.startswith("_") for part in each.module.split(".")[1:])
            or (re.match("_[a-z]", each.name) and not _is_module(each.name))
        )
    }
    assert private == set()


def test_no_module_imports_itself_in_the_end() -> None:
    needs: dict[str, set[str]] = {name: set() for name in FILES}
    for each in all_imports():
        if each.at_once:
            package = f"{each.module}.__init__"
            needs[each.importer].add(package if package in FILES else each.module)
    while leaves := {name for name in needs if not needs[name] & set(needs)}:
        for name in leaves:
            del needs[name]
    assert needs == {}, "each of these needs another one of them"


def internals_of_torch(source: ast.Module) -> Iterator[str]:
    """Names below ``torch`` that are private, or experimental, wherever they are used."""
    for node in ast.walk(source):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            if re.match(r"torch\.(\w+\.)*(_[a-zA-Z]|experimental\b)", name):
                yield name


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("torch_api.")])
def test_torchs_internals_are_named_in_one_place_only(name: str) -> None:
    """In ``torch_api``, with the releases that have them."""
    assert list(internals_of_torch(parsed(name))) == []
