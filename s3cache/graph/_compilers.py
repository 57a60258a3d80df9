"""What programs have a graph compiled by in place of torch's own: decompositions, and compilers.

A backend of the user's hands them to Inductor or to AOTAutograd as arguments; no graph names them,
and torch's keys have none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from s3cache.graph._code import UntoldError, told
from s3cache.graph._definitions import parts_of
from s3cache.graph._whose import ABSENT, foreign_parts, text_of
from s3cache.torch_api import internals

__all__ = ["compilers_text", "table_text"]


def compilers_text(given: Mapping[str, object], vouched: Callable[[object], str | None]) -> str:
    """What of ``given`` is not torch's, in words that another process has for the same; or ``""``.

    Args:
        given: what compiles, by the name of the argument; a dict is a table of decompositions.
        vouched: the version of a function that the user vouched for.

    Raises:
        UntoldError: one of them cannot be told.
    """
    by_inductor = "inner_compile" in given
    words = [] if by_inductor else ["not by Inductor"]
    for name, value in sorted(given.items()):
        try:
            if name == "decompositions":
                table = cast("Mapping[object, object]", value or {})
                text = table_text(table, vouched)
            elif by_inductor:
                text = " ".join(_text(part, vouched) for part in foreign_parts(value))
            else:
                text = _text(value, vouched)
        except UntoldError as exc:
            raise UntoldError(f"{name}, which {exc}") from exc
        if text:
            words.append(f"{name}={text}")
    return " ".join(words)


def _text(value: object, vouched: Callable[[object], str | None]) -> str:
    if isinstance(value, partial):  # the function is another part
        given = value.args, value.keywords
        plain = [part for part in (*given[0], *sorted(given[1].items())) if not callable(part)]
        return told([each for each in plain if not _holds_code(each)], parts_of(vouched))
    version = vouched(value)
    return told(value, parts_of(vouched)) if version is None else f"version {version}"


def _holds_code(item: object) -> bool:
    return isinstance(item, tuple) and any(map(callable, item))


def table_text(
    table: Mapping[object, object], vouched: Callable[[object], str | None] = lambda _: None
) -> str:
    """How a table of decompositions differs from the one that Inductor has; ``""`` if it does not.

    Raises:
        UntoldError: a decomposition in it cannot be told.
    """
    usual = internals.usual_decompositions()
    if table is usual:
        return ""
    changed = [
        (str(name), value)
        for name in usual.keys() | table.keys()
        if (value := table.get(name, ABSENT)) is not usual.get(name, ABSENT)
    ]
    changed.sort(key=lambda each: each[0])
    return " ".join(
        f"{name}={text_of(value, vouched, 'decompositions', name)}" for name, value in changed
    )
