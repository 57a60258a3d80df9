"""Functions of torch's into which a program has put something else: code, defaults, closures.

``F.gelu.__code__ = mine.__code__`` leaves every namespace as it was. What functions are made of is
noted at the end of ``import torch`` where a cache is asked for by then, or else when one is
enabled, and held against what they are made of now.
"""

from __future__ import annotations

import dis
import gc
import os
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_

import _s3cache_autoload
from s3cache.torch_api import internals

__all__ = ["altered_functions", "remember_insides", "stand_in_for"]

_EMPTY = object()
_PLAIN = (type(None), bool, int, float, str)
_MAX_DEPTH = 8
_rebound: dict[int, bool] = {}  # by the place of a cell among those that were noted


def remember_insides(values: Iterable[object]) -> None:
    """What functions among ``values``, and those that they wrap, are made of now is torch's."""
    _s3cache_autoload.insides.add(values)


def altered_functions() -> list[tuple[str, types.FunctionType]]:
    """Those that are not what they were, each with what it was."""
    noted = _s3cache_autoload.insides
    if _is_as_before(noted):
        return []
    cells = {id(cell) for cell in _changed_cells(noted)}
    was = _Past(noted)
    return [
        (was.word(function), function)
        for function, code, defaults, keywords in zip(
            noted.functions, noted.codes, noted.defaults, noted.in_keywords, strict=True
        )
        if function.__code__ != code
        or not internals.are_identical(function.__defaults__ or (), defaults or ())
        or not internals.are_identical(_in_keywords(function.__kwdefaults__), keywords)
        or any(id(cell) in cells for cell in function.__closure__ or ())
    ]


class _Past:
    """What functions were when they were noted, in words: wrappers by what they wrapped, too."""

    def __init__(self, noted: _s3cache_autoload.Insides) -> None:
        self._codes = dict(zip(map(id, noted.functions), noted.codes, strict=True))
        self._contents = dict(zip(map(id, noted.cells), noted.contents, strict=True))

    def word(self, value: object, depth: int = 0) -> str:
        """The place of a function, with those of what it had in its closure."""
        code = self._codes.get(id(value))
        if not isinstance(value, types.FunctionType) or code is None:
            return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
        if depth == _MAX_DEPTH:
            return _place_of(code)
        cells = [self._contents.get(id(cell)) for cell in value.__closure__ or ()]
        held = ", ".join(self.word(each, depth + 1) for each in cells)
        return f"{_place_of(code)}({held})" if held else _place_of(code)


def stand_in_for(function: types.FunctionType) -> types.FunctionType:
    """One that does the same, and is the user's: it is followed, whatever file its code names."""
    code = function.__code__.replace(co_filename="<altered>")
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _place_of(code: types.CodeType) -> str:
    home = internals.torch_directory()
    file = code.co_filename
    file = file.removeprefix(home) if file.startswith(home) else os.path.basename(file)
    return f"{file}:{code.co_firstlineno}:{code.co_name}"


def _is_as_before(noted: _s3cache_autoload.Insides) -> bool:
    """By identity, which is fast: and a default of 1 is not one of True."""
    functions, filled, are_identical = noted.functions, noted.filled, internals.are_identical
    try:
        return (
            all(map(is_, map(_code, functions), noted.codes))
            and all(map(is_, map(_defaults, functions), noted.defaults))
            and all(map(is_, map(_keywords, functions), noted.keywords))
            and all(map(is_, map(_content, noted.cells), noted.contents))
            and are_identical(list(chain.from_iterable(filled)), noted.all_names)
            and are_identical(list(chain.from_iterable(map(dict.values, filled))), noted.all_values)
        )
    except ValueError:  # a cell was emptied
        return False


# Each of them is asked of thousands, which costs half as much without a line of Python for each.
_code, _defaults, _keywords, _content = map(
    attrgetter, ("__code__", "__defaults__", "__kwdefaults__", "cell_contents")
)


def _in_keywords(keywords: dict[str, object] | None) -> tuple[object, ...]:
    return (*keywords, *keywords.values()) if keywords else ()


# -- variables that functions share


def _changed_cells(noted: _s3cache_autoload.Insides) -> Iterator[types.CellType]:
    for index, cell in enumerate(noted.cells):
        try:
            content = cell.cell_contents
        except ValueError:
            content = _EMPTY
        if content is noted.contents[index]:
            continue
        if index not in _rebound:
            _rebound[index] = _is_rebound(cell)
        if not _rebound[index]:
            yield cell


def _is_rebound(cell: types.CellType) -> bool:
    """Whether a function that has the variable assigns to it: then torch does so as it works."""
    for closure in gc.get_referrers(cell):
        if type(closure) is not tuple:
            continue
        for function in gc.get_referrers(closure):
            if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                names = zip(function.__code__.co_freevars, closure, strict=False)
                if any(each is cell and _assigns(function.__code__, name) for name, each in names):
                    return True
    return False


def _assigns(code: types.CodeType, name: str) -> bool:
    if any(
        each.opname in ("STORE_DEREF", "DELETE_DEREF") and each.argval == name
        for each in dis.get_instructions(code)
    ):
        return True
    return any(
        _assigns(inner, name)
        for inner in code.co_consts
        if isinstance(inner, types.CodeType) and name in inner.co_freevars
    )
