"""Compiled Python code: what it is, and what it may read from outside of itself."""

from __future__ import annotations

import dis
import functools
import hashlib
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "IN_CONTAINERS",
    "Chain",
    "Reads",
    "closure_of",
    "code_digest",
    "content_of",
    "names_in",
    "reads_of",
    "writes_of",
]

_Operation: TypeAlias = tuple[str, object]

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL")
# They make a cell of a variable for code inside, which is read where that code reads it.
_PASS_ON = ("LOAD_CLOSURE", "LOAD_CONST")
_NAME = re.compile(r"[A-Za-z_][\w.]*")


@dataclass(frozen=True, order=True)
class Chain:
    """One value that code reads, and what it reads of it in turn: ``package.module.VALUE``.

    Attributes:
        root: ``global``, ``free`` (of a closure), ``import``, or ``bind``: an import that binds
            what it finds to a variable, through which it is read.
        name: of the variable, or of the module.
        level: how many packages up an import begins.
        attributes: what is read of it, one of the other.
    """

    root: str
    name: str
    level: int = 0
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reads:
    """All that code, and the code inside of it, may read.

    Attributes:
        chains: what it begins with, sorted.
        names: of attributes, and strings that may be used as such.
    """

    chains: tuple[Chain, ...]
    names: frozenset[str]


def names_in(text: str) -> list[str]:
    """The names that a string may stand for: ``attrgetter("a.b")`` reads two attributes."""
    return text.split(".") if len(text) <= 200 and _NAME.fullmatch(text) else []


@functools.lru_cache(maxsize=8192)
def reads_of(code: types.CodeType) -> Reads:
    """What ``code`` may read; the same for equal code, whatever is read there."""
    names: set[str] = set()
    chains: set[Chain] = set()
    inner = list(_nested(code))
    listed = [[(each.opname, each.argval) for each in dis.get_instructions(one)] for one in inner]
    imported: dict[str, Chain] = {}
    for instructions in listed:
        for chain, variable in _imports(instructions):
            chains.add(chain)
            if variable is not None:
                imported[variable] = chain
    for each, instructions in zip(inner, listed, strict=True):
        names.update(each.co_names)
        for constant in _strings(each.co_consts):
            names.update(names_in(constant))
        chains.update(_loads(instructions, imported, frozenset(code.co_freevars)))
    return Reads(tuple(sorted(chains)), frozenset(names))


@functools.lru_cache(maxsize=8192)
def writes_of(code: types.CodeType) -> frozenset[str]:
    """Names of attributes and variables that ``code`` sets, and :data:`IN_CONTAINERS`."""
    found = set()
    for one in _nested(code):
        shared = {"STORE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"}
        for each in dis.get_instructions(one):
            if each.opname in shared or (
                each.opname == "STORE_DEREF" and each.argval in one.co_freevars
            ):
                found.add(str(each.argval))
            elif each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                found.add(IN_CONTAINERS)
    if not _CHANGING.isdisjoint(reads_of(code).names):
        found.add(IN_CONTAINERS)
    return frozenset(found)


#: Stands for what is in lists, dictionaries and sets.
IN_CONTAINERS = "[]"
_CHANGING = frozenset(
    """
    add append appendleft clear difference_update discard extend extendleft insert
    intersection_update pop popitem popleft remove setdefault subtract
    symmetric_difference_update update
    """.split()  # noqa: SIM905 - nobody reads one word a line
)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code`` and all code inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _strings(constants: Sequence[object]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _strings(list(constant))


def _imports(instructions: list[_Operation]) -> Iterator[tuple[Chain, str | None]]:
    """What import statements read, with the variable that it is bound to, if it is that simple."""
    for index, instruction in enumerate(instructions):
        if instruction[0] != "IMPORT_NAME":
            continue
        up: object = instructions[index - 2][1]
        given: object = instructions[index - 1][1]
        name, level = str(instruction[1]), up if isinstance(up, int) else 0
        following = instructions[index + 1 :]
        if given:  # from name import given
            while len(following) > 1 and following[0][0] == "IMPORT_FROM":
                read = (str(following[0][1]),)
                if following[1][0] in _STORES:
                    yield Chain("bind", name, level, read), str(following[1][1])
                else:
                    yield Chain("import", name, level, read), None
                following = following[2:]
        elif following and following[0][0] in _STORES:  # import name
            top = Chain("bind", name.partition(".")[0], level)
            yield top, str(following[0][1])
            yield Chain("bind", name, level), None
        else:  # import name as another
            yield Chain("import", name, level), None


def _loads(
    instructions: list[_Operation], imported: dict[str, Chain], free: frozenset[str]
) -> Iterator[Chain]:
    for index, instruction in enumerate(instructions):
        operation = instruction[0]
        if not operation.startswith("LOAD_") or operation in (*_PASS_ON, *_ATTRIBUTES):
            continue
        argument: object = instruction[1]
        several: tuple[object, ...] = argument if isinstance(argument, tuple) else (argument,)
        read: list[str] = []
        for following in instructions[index + 1 :]:
            if following[0] not in _ATTRIBUTES:
                break
            read.append(str(following[1]))
        for variable in several:
            attributes = tuple(read) if variable is several[-1] else ()
            begun = imported.get(str(variable))
            if begun is not None:
                yield Chain("import", begun.name, begun.level, begun.attributes + attributes)
            if operation in _OF_GLOBALS:
                yield Chain("global", str(variable), 0, attributes)
            elif variable in free:
                yield Chain("free", str(variable), 0, attributes)


# -- what code is


@functools.lru_cache(maxsize=8192)
def code_digest(code: types.CodeType) -> str:
    """Of all of it but for names of local variables, and where it lies in a file.

    Names of arguments are more than that: callers give them by name.
    """
    words: list[object] = [
        code.co_code.hex(),
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount],
        code.co_flags,
        len(code.co_varnames),
        getattr(code, "co_exceptiontable", b"").hex(),
        code.co_names,
        [_constant(constant) for constant in code.co_consts],
    ]
    return hashlib.sha256(repr(words).encode(errors="surrogatepass")).hexdigest()


def _constant(value: object) -> str:
    """A constant of code, in words: the order of a frozen set differs between processes."""
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_constant, value))}"
    return f"{type(value).__name__} {value!r}"


def closure_of(function: types.FunctionType) -> dict[str, object]:
    """What a function has from the one that it was made in, by name."""
    cells = function.__closure__ or ()
    return {
        name: content_of(cell)
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


def content_of(cell: types.CellType) -> object:
    """What a variable that inner functions share is bound to; ``None`` if to nothing yet."""
    try:  # a thousand times for each key, where suppress() would take longer than all else
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
