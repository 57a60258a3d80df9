"""Thousands of changes to programs, from grammars."""

from __future__ import annotations

from tests.equal.changes import aliasing, asking, backwards, changes, replacing, sizes, users
from tests.equal.programs import Pair


def all_pairs() -> list[Pair]:
    """Return every pair, in a fixed order."""
    return [
        *changes.changes(),
        *users.changes(),
        *aliasing.guards(),
        *aliasing.triples(),
        *aliasing.offsets(),
        *aliasing.subclasses(),
        *backwards.backwards(),
        *replacing.replacements(),
        *asking.asked(),
        *sizes.pairs(),
    ]
