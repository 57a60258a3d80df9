"""Imports between rooms of s3cache obey the rules in CONTRIBUTING."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_TOP = ("__init__", "__main__")  # they may import all rooms


@dataclass(frozen=True)
class Import:
    """``importer`` imports ``name`` from ``module``; modules are named within s3cache."""

    importer: str
    module: str
    name: str
    at_once: bool  # at the import of the importer, not when a function runs

    @property
    def rooms(self) -> tuple[str, str]:
        return self.importer.partition(".")[0], self.module.partition(".")[0]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "s3cache").with_suffix("").parts)


#: Files of all modules by their names within s3cache; a package has the name of its file.
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
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("_s3cache_"):
            yield Import(importer, node.module or "", "", at_once)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(("s3cache.", "_s3cache_")):
                    yield Import(importer, alias.name.removeprefix("s3cache."), "", at_once)


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
    """Return the rooms of CONTRIBUTING's table, from the lowest one up."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`s3cache/[^|]+)\|", page, re.MULTILINE)
    return [room for cell in cells for room in re.findall(r"`s3cache/(\w+)(?:/|\.py)`", cell)]


def test_each_room_is_in_the_table() -> None:
    rooms = {name.partition(".")[0] for name in FILES} - {*_TOP}
    assert sorted(rooms) == sorted(rooms_in_order())


def test_rooms_import_lower_rooms_only() -> None:
    """A room imports only rooms above it in the table, which begins with the lowest room."""
    order = ["_s3cache_process", *rooms_in_order(), *_TOP]
    upward = [
        each
        for each in all_imports()
        if each.rooms[0] != each.rooms[1]
        and order.index(each.rooms[0]) < order.index(each.rooms[1])
    ]
    assert upward == []


def test_no_module_imports_private_names_of_another_package() -> None:
    """This is true for modules and names: a package exports its interface."""
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


def circle() -> list[str]:
    """Return modules that import each other in a circle, if there are any.

    All imports count, also those in functions and for types. To import a package is to import what
    it exports. The files beside the package count.
    """
    outside = {path.stem: path for path in ROOT.glob("_s3cache_*.py")}
    needs: dict[str, set[str]] = {name: set() for name in (*FILES, *outside)}
    beside = [
        each
        for name, path in outside.items()
        for each in imports(ast.parse(path.read_text(encoding="utf-8")), name)
    ]
    for each in (*all_imports(), *beside):
        package = f"{each.module}.__init__"
        needs[each.importer].add(package if package in FILES else each.module)

    try:
        TopologicalSorter(needs).prepare()
    except CycleError as exc:
        return [*exc.args[1]]
    return []


def test_no_modules_import_each_other() -> None:
    assert circle() == []


#: Functions that take the name of a module or an attribute.
_BY_NAME = frozenset({"import_module", "__import__", "getattr", "hasattr", "setattr", "delattr"})


@cache
def _constants() -> dict[str, str]:
    """Return the texts of constants of all modules by their names."""
    return {
        target.id: node.value.value
        for name in FILES
        for node in parsed(name).body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


@cache
def _text(node: ast.expr | None) -> str:
    """Return the text of an expression; ``*`` for one that has none before it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _constants().get(node.id if isinstance(node, ast.Name) else node.attr, "*")
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return _text(node.value) if isinstance(node, ast.FormattedValue) else "*"


def reached_in_torch(source: ast.Module) -> Iterator[str]:
    """Yield the names that a module reaches in ``torch`` by imports, attributes and texts.

    Public attributes are left out; ``*`` is a name that is known only when the code runs.
    """
    for node in ast.walk(source):
        names: list[str] = []
        by_text = False
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Subscript):
            by_text = ast.unparse(node.value) == "sys.modules"
            names = [_text(node.slice)] if by_text else []
        elif isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func)
            by_text = function == "sys.modules.get" or function.endswith("import_module")
            if by_text or function == "__import__":
                names = [_text(node.args[0])]
            elif function in _BY_NAME and len(node.args) > 1:
                names = [f"{ast.unparse(node.args[0])}.{_text(node.args[1])}"]
        for name in names:
            private = re.match(r"torch\.(\w+\.)*(_[a-zA-Z]|experimental\b|\*)", name)
            if private or (by_text and re.match(r"torch\b", name)):
                yield name


#: Names that are not declared, by module, with the reason.
_REACHED = {
    # The name of a public constant, such as a dtype, from an entry.
    "features.recall.dynamo": {"torch.*"},
    "hooks._first_calls": {"torch.*"},
    # Operators and methods by name, which are public.
    "features.target.install": {"torch.ops.aten.*"},
    "torch_api.lookups": {"torch.*", "torch.Tensor.*"},
    # Whether torch is imported at all.
    "features.ports.files": {"torch"},
}


@pytest.mark.parametrize("name", FILES)
def test_each_internal_of_torch_is_declared(name: str) -> None:
    """A declaration says which releases have the name; one command checks all of them."""
    assert set(reached_in_torch(parsed(name))) == _REACHED.get(name, set())


def test_ways_of_reaching_torch_are_found() -> None:
    ways = """
import torch._inductor
from torch._guards import Guard
torch._C._dispatch_keys(tensor)
sys.modules["torch._dynamo"].config
sys.modules.get("torch.compiler")
importlib.import_module("torch._dynamo.guards")
import_module(f"torch.{name}")
getattr(torch, "_C")
getattr(torch.ops, name)
torch.fx.experimental.proxy_tensor
"""
    lines = [line for line in ways.splitlines() if line]
    assert [line for line in lines if not set(reached_in_torch(ast.parse(line)))] == []
    assert set(reached_in_torch(ast.parse("import torch\ntorch.nn.Linear(1, 1)"))) == set()
