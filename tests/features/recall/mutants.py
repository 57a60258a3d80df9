"""Programs of several files, and changes of one of them, as somebody might edit it.

A file of programs has ``#: name`` before each program, and ``## path`` before each of its files.
Files below ``site-packages/`` belong to installed packages; the file ``environment`` has variables.
Python is changed in its syntax tree. Nothing here knows what recall compares.
"""

from __future__ import annotations

import ast
import base64
import copy
import hashlib
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

_REAL = Path(__file__).with_name("real")
_SITE = "site-packages"
#: What is changed: code in a module, in a class, a default of a parameter, a configuration file, a
#: variable of the environment, an installed package; and one edited where it is installed.
KINDS = ("module", "class", "default", "configuration", "environment", "package", "edited package")

_Files: TypeAlias = Mapping[str, str]
_Edit: TypeAlias = tuple[str, Callable[[], Any]]  # the kind, and what makes it


@dataclass(frozen=True)
class Program:
    """A program: its name, and its files by path."""

    name: str
    files: _Files

    @property
    def variables(self) -> dict[str, str]:
        lines = self.files.get("environment", "").splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}


@dataclass(frozen=True)
class Mutant:
    """A program with one change, of a kind, in words.

    ``installed`` has the files that its packages list as installed.
    """

    kind: str
    words: str
    program: Program
    installed: _Files
    version: str = "1.0"


def real_programs() -> list[Program]:
    """Return all programs, with Python as the mutator would write it."""
    programs = []
    for path in sorted(_REAL.glob("*.txt")):
        for part in re.split(r"^#: ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            name, *files = re.split(r"^## ", part, flags=re.MULTILINE)
            split = (file.partition("\n") for file in files)
            texts = {place: text.strip("\n") + "\n" for place, _, text in split}
            for place in texts:
                if place.endswith(".py"):
                    texts[place] = ast.unparse(ast.parse(texts[place])) + "\n"
            programs.append(Program(name.strip(), texts))
    return programs


def write(mutant: Mutant, folder: Path) -> None:
    """Write the files of a program, and install its packages."""
    for place, text in mutant.program.files.items():
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for package in {place.split("/")[1] for place in mutant.installed if _SITE in place}:
        info = folder / _SITE / f"{package.removesuffix('.py')}-{mutant.version}.dist-info"
        info.mkdir()
        lines = [
            _line_of_record(place.partition("/")[2], text)
            for place, text in mutant.installed.items()
            if place.startswith(f"{_SITE}/{package}")
        ]
        (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]) + "\n")
        about = f"Metadata-Version: 2.1\nName: {package}\nVersion: {mutant.version}\n"
        (info / "METADATA").write_text(about)
    for path in [*folder.rglob("*")]:
        os.utime(path, (0, 0))  # the second rule distrusts files that are newer than the process
    for place, text in mutant.program.files.items():
        if text != mutant.installed[place]:  # edited after it was installed
            os.utime(folder / place, (1, 1))


def _line_of_record(place: str, text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"{place},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},{len(text)}"


def unchanged(program: Program) -> Mutant:
    """Return the program itself."""
    return Mutant("unchanged", "", program, program.files)


def mutants_of(program: Program, count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants, as many of each kind as possible."""
    chance = random.Random(f"{seed} {program.name}")
    found: dict[str, list[Callable[[], Mutant]]] = {kind: [] for kind in KINDS}
    for kind, make in _all_mutants(program):
        found[kind].append(make)
    for makes in found.values():
        chance.shuffle(makes)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(found.values()):
        mutants = [makes.pop()() for makes in found.values() if makes]
        chosen += [each for each in mutants if each.program != program or each.version != "1.0"]
    return chosen[:count]


def _all_mutants(program: Program) -> Iterator[tuple[str, Callable[[], Mutant]]]:
    """Yield the kind of each mutant, and a function that makes it."""
    for place, text in program.files.items():
        for number, (kind, _) in enumerate(_edits_of(place, text)):
            make = partial(_edited, program, place, number)
            if place.startswith(_SITE):
                yield "edited package", partial(make, "edited package")
                yield "package", partial(make, "package", ("1.0", "1.1")[number % 2])
            else:
                yield kind, partial(make, kind)
    if any(place.startswith(_SITE) for place in program.files):
        yield "package", partial(Mutant, "package", "1.0.1", program, program.files, "1.0.1")


def _edited(program: Program, place: str, number: int, kind: str, version: str = "1.0") -> Mutant:
    text = program.files[place]
    changed = _edits_of(place, text)[number][1]()
    edited = Program(program.name, {**program.files, place: changed})
    installed = program.files if kind == "edited package" else edited.files
    lines = itertools.zip_longest(text.splitlines(), changed.splitlines(), fillvalue="")
    words = next((f"{one.strip()} -> {other.strip()}" for one, other in lines if one != other), "")
    return Mutant(kind, f"{place} ({version}): {words}", edited, installed, version)


def _edits_of(place: str, text: str) -> list[_Edit]:
    """Return the possible edits of a file; one of them may be made, and returns the new text."""
    if place.endswith(".py"):
        tree = ast.parse(text)
        edits = _edits(tree, "module", _words_in(tree))
        return [
            (kind, partial(_after, edit, lambda: f"{ast.unparse(tree)}\n")) for kind, edit in edits
        ]
    if place.endswith(".json"):
        table = [json.loads(text)]
        return [
            ("configuration", partial(_after, edit, lambda: f"{json.dumps(table[0])}\n"))
            for edit in _edits_of_data(table)
        ]
    kind, lines = "environment" if place == "environment" else "configuration", text.splitlines()

    def joined(number: int, *new: str) -> str:
        return "\n".join([*lines[:number], *new, *lines[number + 1 :]]) + "\n"

    found: list[_Edit] = [(kind, lambda: text + "UNUSED_BY_ALL=1\n")]
    for number, line in enumerate(lines):
        name, equals, value = line.partition("=")
        if equals:
            found.append((kind, partial(joined, number)))
            for new in _other_values(_parsed(value.strip()), []):
                changed = f"{name}={' ' * value.startswith(' ')}{new}"
                found.append((kind, partial(joined, number, changed)))
    return found


def _after(edit: Callable[[], Any], text: Callable[[], str]) -> str:
    edit()
    return text()


# -- data


def _parsed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def _edits_of_data(table: Any) -> Iterator[Callable[[], Any]]:
    """Yield edits of the JSON value ``table``."""
    words = _texts_in(table)
    for key in [*table] if isinstance(table, dict) else range(len(table)):
        value = table[key]
        if isinstance(value, (dict, list)):
            yield from _edits_of_data(value)
        if isinstance(value, list) and len(value) > 1:
            yield from (value.reverse, value.pop)
        if isinstance(value, dict):
            yield from (partial(value.pop, name) for name in value)
            yield partial(value.__setitem__, "unused_by_all", 1)
        for new in _other_values(value, words):
            yield partial(table.__setitem__, key, new)


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, (dict, list)):
        parts = [*value.values()] if isinstance(value, dict) else value
        return [text for part in parts for text in _texts_in(part)]
    return [value] if isinstance(value, str) else []


_SWAPS = """
relu gelu silu tanh sigmoid|ReLU GELU SiLU Tanh|sum mean amax|sin cos|softmax log_softmax
max min|maximum minimum|zeros ones|zeros_like ones_like|mse_loss l1_loss smooth_l1_loss
add sub mul|exp expm1|sqrt rsqrt|square abs|triu tril|AdamW Adam|SGD Adagrad
avg_pool2d max_pool2d|no_grad enable_grad|range reversed|softplus relu|any all|len sum|upper lower
"""
_TURNS = {
    name: names[(place + 1) % len(names)]
    for names in map(str.split, _SWAPS.replace("\n", "|").split("|"))
    for place, name in enumerate(names)
}


def _other_values(value: Any, words: list[str]) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
        yield value * 2 or -1
    elif isinstance(value, float):
        yield value * 2 or 1.0
        yield value + 0.25
    elif isinstance(value, str):
        yield _TURNS.get(value, f"{value}_")
        yield from [word for word in dict.fromkeys(words) if word != value][:2]
    elif value is None:
        yield 0


# -- Python


def _words_in(tree: ast.AST) -> list[str]:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return sorted({value for value in constants if isinstance(value, str)})


def _edits(node: ast.AST, kind: str, words: list[str]) -> Iterator[_Edit]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "names"):
            continue
        is_list = isinstance(value, list)
        here = "default" if name in ("defaults", "kw_defaults") else kind
        for place, child in enumerate(value if is_list else [value]):
            put = partial(value.__setitem__, place) if is_list else partial(setattr, node, name)
            if isinstance(child, ast.expr):
                yield from ((here, partial(put, new)) for new in _other_expressions(child, words))
            if isinstance(child, (ast.Assign, ast.AugAssign, ast.Expr, ast.AnnAssign)):
                yield here, partial(put, ast.Pass())
            if isinstance(child, ast.stmt) and value[place + 1 :]:
                yield here, partial(_put_later, value, place)
            if name == "decorator_list":
                yield here, partial(value.pop, place)
            if isinstance(child, ast.AST):
                inside = "class" if isinstance(child, ast.ClassDef) else here
                yield from _edits(child, inside, words)


def _put_later(statements: list[Any], place: int) -> None:
    statements.insert(place + 1, statements.pop(place))


_OPERATORS = dict(
    pair.split()
    for pair in """
    Add Sub,Sub Add,Mult Add,Div Mult,FloorDiv Mod,Mod FloorDiv,Pow Mult,USub UAdd,And Or,Or And
    Lt LtE,LtE Gt,Gt GtE,GtE Lt,Eq NotEq,NotEq Eq,Is IsNot,IsNot Is,In IsNot
    """.replace("\n", ",").split(",")
    if pair.strip()
)


def _other_expressions(node: ast.expr, words: list[str]) -> Iterator[ast.expr]:
    """Yield expressions that somebody might have written instead."""
    new: Any = copy.deepcopy(node)
    if isinstance(node, ast.Constant):
        for value in _other_values(node.value, words):
            yield ast.Constant(value)
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.UnaryOp)):
        if other := _OPERATORS.get(type(node.op).__name__):
            new.op = getattr(ast, other)()
            yield new
    elif isinstance(node, ast.Compare):
        if other := _OPERATORS.get(type(node.ops[0]).__name__):
            new.ops[0] = getattr(ast, other)()
            yield new
    elif isinstance(node, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
        yield new
    elif isinstance(node, ast.Attribute) and node.attr in _TURNS:
        new.attr = _TURNS[node.attr]
        yield new
    elif isinstance(node, ast.Call):
        if len(node.args) > 1:
            new.args[:2] = new.args[1::-1]
            yield new
        if node.keywords:
            yield ast.Call(node.func, node.args, node.keywords[:-1])
        if len(node.args) == 1:
            yield node.args[0]
    elif isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) > 1:
        if isinstance(node.ctx, ast.Load):
            yield type(node)(node.elts[::-1], ast.Load())
            yield type(node)(node.elts[:-1], ast.Load())
    elif isinstance(node, ast.Dict) and len(node.keys) > 1:
        yield ast.Dict(node.keys, node.values[::-1])
        yield ast.Dict(node.keys[:-1], node.values[:-1])
