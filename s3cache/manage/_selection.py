"""Choose entries, and find what was asked for that no entry has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from s3cache.errors import CorruptError, UntrustedError

if TYPE_CHECKING:
    from s3cache.manage._items import About, Item

__all__ = ["Seen", "Selection", "Unmatched", "is_release"]

# A frame of a later release: nobody who cannot read it knows whether it is damaged.
_NEWER = "frame version"
# What the key of a shape profile begins with, and no other.
_PROFILE = "p"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """All entries for which everything that is said here is true; without a word, all of them.

    What cannot be read says nothing of itself: it is chosen by its key, age and size, or as
    ``unreadable`` or ``untrusted``, and by nothing else.

    Attributes:
        keys: those whose key begins with one of these.
        named: those whose key, or whose own name below a remote, is one of these.
        older_s, newer_s: by the time of their last change, or use in a local tier.
        min_bytes, max_bytes: by their size, both included.
        kinds, tags, signers: those that have one of these.
        torch: those made by a release that begins so, as ``2.12`` or ``2.12.1``.
        devices: those with code for one of these.
        but_keys: those whose key is none of these, which were hit; no shape profiles, as nobody
            records that one was used.
        unreadable: those that are damaged or out of place, but not what a later release wrote.
        untrusted: those that the policy does not use. With ``unreadable`` either is enough.
    """

    keys: tuple[str, ...] = ()
    named: frozenset[str] | None = None
    older_s: float | None = None
    newer_s: float | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    kinds: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    signers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    but_keys: frozenset[str] | None = None
    unreadable: bool = False
    untrusted: bool = False
    now: Callable[[], float] = field(default=time.time, compare=False, repr=False)

    @property
    def is_everything(self) -> bool:
        """Whether nothing is said."""
        return self == Selection()

    @property
    def needs_heads(self) -> bool:
        """Whether it takes a look at headers."""
        return self.unreadable or self.untrusted or self._by_what_it_says

    @property
    def _by_what_it_says(self) -> bool:
        return bool(self.kinds or self.torch or self.tags or self.signers or self.devices)

    def admits(self, item: Item) -> bool:
        """Whether ``item`` may be chosen, by what a listing tells."""
        age_s = self.now() - item.modified
        return (
            (not self.keys or item.key.startswith(self.keys))
            and (self.named is None or not self.named.isdisjoint((item.key, item.place)))
            and (self.but_keys is None or self._is_other(item.key))
            and (self.older_s is None or age_s >= self.older_s)
            and (self.newer_s is None or age_s < self.newer_s)
            and (self.min_bytes is None or item.size >= self.min_bytes)
            and (self.max_bytes is None or item.size <= self.max_bytes)
        )

    def _is_other(self, key: str) -> bool:
        return key not in (self.but_keys or ()) and not key.startswith(_PROFILE)

    def chooses(self, item: Item) -> bool:
        """Whether ``item``, whose header was read, is chosen."""
        if not self.admits(item):
            return False
        if self.unreadable or self.untrusted:
            problem = item.problem
            is_wanted = (self.untrusted and isinstance(problem, UntrustedError)) or (
                self.unreadable and isinstance(problem, CorruptError) and problem.where != _NEWER
            )
            if not is_wanted:
                return False
        if not self._by_what_it_says:
            return True
        about = item.about
        return (
            about is not None
            and (not self.kinds or about.kind in self.kinds)
            and (not self.torch or any(is_release(about.torch, each) for each in self.torch))
            and (not self.tags or about.tag in self.tags)
            and (not self.signers or bool({*about.signers} & {*self.signers}))
            and (not self.devices or bool({*about.devices} & {*self.devices}))
        )


def is_release(version: str, wanted: str) -> bool:
    """Whether ``2.13.0+cpu`` is meant by ``2.13``; ``2.1`` means no ``2.13``."""
    return version == wanted or version.startswith((f"{wanted}.", f"{wanted}+"))


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
        self._left = {(name, value) for name, asked in self._asked.items() for value in asked}
        self._there: dict[str, set[str]] = {name: set() for name in self._asked}

    def note(self, about: About) -> None:
        """See what one header says."""
        self._is_empty = False
        for of, value in _values(about):
            there = self._there[of]
            if value and len(there) < _REMEMBERED_AT_MOST:
                there.add(value)
            self._left -= {
                (name, asked)
                for name, asked in self._left
                if name == of and (value == asked or (name == "torch" and is_release(value, asked)))
            }

    def unmatched(self) -> list[Unmatched]:
        """What no entry has, of all that were looked at; nothing if there were none."""
        return [
            Unmatched(name, value, tuple(sorted(self._there[name])))
            for name, asked in self._asked.items()
            for value in dict.fromkeys(asked)
            if not self._is_empty and (name, value) in self._left
        ]


def _values(about: About) -> Iterator[tuple[str, str]]:
    yield "kinds", about.kind
    yield "torch", about.torch
    yield "tags", about.tag
    yield from (("signers", name) for name in about.signers)
    yield from (("devices", name) for name in about.devices)
