"""Where tests lie and what they may name: what ``tests/README.md`` says of them holds."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
FILES = {
    path.relative_to(TESTS).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(TESTS.rglob("*.py"))
}
MODULES = {path.stem for path in (ROOT / "s3cache").rglob("*.py")}
PACKAGE = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "s3cache").rglob("*.py")]

# Folders that test a package of another name, whose private modules they may import.
_ALSO_OF = {"perturb": "graph"}
# A private name that a test needs after all, and why.
_ALLOWED = {
    ("conftest.py", "_sections"): "the only place that may block is told to blockbuster by name",
    ("perturb/changes.py", "_config"): "torch's: the options of a config module, with their types",
}


def text(node: ast.AST) -> str:
    """What a string constant says; nothing for other nodes."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def scripts(source: ast.Module) -> Iterator[ast.Module]:
    """The module, and the programs in its strings, which run in processes of their own."""
    yield source
    for node in ast.walk(source):
        if "\n" in text(node):
            try:
                yield ast.parse(textwrap.dedent(text(node)))
            except SyntaxError:
                continue


def imported(source: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of each import; without a name the whole module."""
    for script in scripts(source):
        for node in ast.walk(script):
            if isinstance(node, ast.ImportFrom):
                yield from ((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)


def folder(file: str) -> str:
    return file.rpartition("/")[0]


# -- places


def test_each_package_has_its_folder() -> None:
    packages = {
        path.parent.relative_to(ROOT / "s3cache").as_posix()
        for path in (ROOT / "s3cache").rglob("__init__.py")
    } - {"."}
    assert packages <= {folder(file) for file in FILES}


def test_the_readme_has_a_line_for_each_folder_and_no_other() -> None:
    page = (TESTS / "README.md").read_text(encoding="utf-8")
    there = {folder(file).partition("/")[0] for file in FILES} - {""}
    assert re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE) == sorted(there)


def test_each_module_of_support_is_listed() -> None:
    page = ast.get_docstring(FILES["support/__init__.py"]) or ""
    listed = re.findall(r"`~tests\.support\.(\w+)`", page)
    there = {Path(file).stem for file in FILES if folder(file) == "support"} - {"__init__"}
    assert sorted(listed) == sorted(there)


# -- imports of tests and of private modules


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
    found = {file: [*strange_imports(file, source)] for file, source in FILES.items()}
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
    found = {file: [*private_imports(file, source)] for file, source in FILES.items()}
    assert {file: modules for file, modules in found.items() if modules} == {}


# -- private names


def private_names() -> set[str]:
    """Of attributes, functions, classes and variables in s3cache."""
    names = set()
    for source in PACKAGE:
        for node in ast.walk(source):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return {name for name in names if re.match("_[a-zA-Z]", name)}


PRIVATE = private_names()
_BY_NAME = {"can_block_in", "delattr", "getattr", "hasattr", "object", "setattr"}


def private_uses(source: ast.Module) -> Iterator[str]:
    """Attributes but for an object's own, also those that are patched, and what is imported."""
    for script in scripts(source):
        for node in ast.walk(script):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner not in ("self", "cls") and not re.match(r"torch\b", owner):
                    yield node.attr
            elif isinstance(node, ast.Call):
                if ast.unparse(node.func).rpartition(".")[2] in _BY_NAME:
                    yield from map(text, node.args)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("s3cache"):
                yield from {alias.name for alias in node.names} - MODULES


def test_nothing_private_to_an_object_or_module_is_named() -> None:
    uses = {(file, name) for file, source in FILES.items() for name in private_uses(source)}
    assert {(file, name) for file, name in uses if name in PRIVATE} == {*_ALLOWED}


@pytest.mark.parametrize(
    "code",
    [
        "store._objects",
        "cache._engine._disk.tier",
        'monkeypatch.setattr(RemoteTier, "_join", counted)',
        "from s3cache.tier._bounds import _parse",
        'run_script("""\nprint(cache._engine)\n""")',
    ],
)
def test_a_private_name_would_be_noticed(code: str) -> None:
    assert PRIVATE & {*private_uses(ast.parse(code))}
    fine = ast.parse("self._objects = 1; torch._C._enable(x); node._rename(x)")
    assert not PRIVATE & {*private_uses(fine)}


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("cache/test_cache.py", "from tests.tier.test_disk import x"),
        ("cache/test_cache.py", "from tests.cache import test_closing"),
        ("cache/test_cache.py", "import tests.tier.books"),
        ("cache/test_cache.py", "from tests.tier import books"),
    ],
)
def test_a_strange_import_would_be_noticed(file: str, code: str) -> None:
    assert list(strange_imports(file, ast.parse(code)))
    fine = "from tests.cache.answers import hit; from tests.support import waiting"
    assert not list(strange_imports(file, ast.parse(fine)))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("cache/test_cache.py", "from s3cache.tier import _disk"),
        ("cache/test_cache.py", "import s3cache.tier._disk"),
        ("store/test_file.py", "from s3cache.store.s3._client import timestamp"),
        ("test_settings.py", "from s3cache.cache._engine import Engine"),
    ],
)
def test_a_private_import_would_be_noticed(file: str, code: str) -> None:
    assert list(private_imports(file, ast.parse(code)))
    assert not list(private_imports("tier/test_disk.py", ast.parse("import s3cache.tier._disk")))
