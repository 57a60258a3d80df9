"""What the entries of a place have, of that by which one chooses: for who has misspelt it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from s3cache.catalog._selection import Selection, is_release

if TYPE_CHECKING:
    from s3cache.catalog._items import About

__all__ = ["Seen", "Unmatched"]

# So many values of one kind are remembered, whatever there is in a bucket.
_REMEMBERED_AT_MOST = 20


class Unmatched(NamedTuple):
    """Something that was asked for, and that no entry has.

    Attributes:
        field: of a selection.
        value: what was asked for.
        there: what entries have instead, if anything: some of it, where it is much.
    """

    field: str
    value: str
    there: tuple[str, ...]


class Seen:
    """Remembers what headers say, as far as ``selection`` chooses by it."""

    def __init__(self, selection: Selection) -> None:
        self._is_empty = True
        self._asked: dict[str, tuple[str, ...]] = {
            "kinds": selection.kinds,
            "torch": selection.torch,
            "tags": selection.tags,
            "signers": selection.signers,
            "devices": selection.devices,
        }
        self._left = {(field, value) for field, asked in self._asked.items() for value in asked}
        self._there: dict[str, set[str]] = {field: set() for field in self._asked}

    def note(self, about: About) -> None:
        """See what one header says."""
        self._is_empty = False
        for field, value in _values(about):
            there = self._there[field]
            if value and len(there) < _REMEMBERED_AT_MOST:
                there.add(value)
            self._left -= {
                (name, asked)
                for name, asked in self._left
                if name == field
                and (value == asked or (name == "torch" and is_release(value, asked)))
            }

    def unmatched(self) -> list[Unmatched]:
        """What no entry has, of all that were looked at; nothing if there were none."""
        return [
            Unmatched(field, value, tuple(sorted(self._there[field])))
            for field, asked in self._asked.items()
            for value in dict.fromkeys(asked)
            if not self._is_empty and (field, value) in self._left
        ]


def _values(about: About) -> Iterator[tuple[str, str]]:
    yield "kinds", about.kind
    yield "torch", about.torch
    yield "tags", about.tag
    yield from (("signers", name) for name in about.signers)
    yield from (("devices", name) for name in about.devices)
