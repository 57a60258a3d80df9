"""Choose entries by their names, sizes, ages and headers, and read manifests that name them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from s3cache import entries
from s3cache.errors import ConfigError, CorruptError, S3CacheError, UntrustedError

_NAMESPACE = re.compile(r"[0-9a-f]{16}/(?=v1/)")
# Where a CorruptError says that a later release wrote the frame: it may well be sound.
_NEWER = "frame version"
# The keys of shape profiles begin so, and no others.
_PROFILE = "p"
_MANIFEST_CHARACTERS = 60

#: The fields of headers by which entries are chosen and grouped, by the name of the option.
HEADER_FIELDS = {
    "kind": "kind",
    "torch": "torch",
    "tag": "tag",
    "signer": "signers",
    "device": "devices",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a store: its header, if it was read, or why that cannot be used.

    ``modified`` is Unix time; in the local tier that of its last use.
    """

    name: str
    size: int
    modified: float
    about: Mapping[str, Any] | None = None
    problem: S3CacheError | None = None

    @property
    def place(self) -> str:
        """Return its name without the directory that a local tier keeps for each remote."""
        return _NAMESPACE.sub("", self.name, count=1)

    @property
    def key(self) -> str:
        return entries.key_of(self.name)

    @property
    def age_s(self) -> float:
        return time.time() - self.modified

    def values(self, field: str) -> tuple[str, ...] | None:
        """Return the values of a header's field that are not empty; None without a header."""
        if self.about is None:
            return None
        value = self.about[HEADER_FIELDS[field]]
        return tuple(filter(None, (value,) if isinstance(value, str) else value))

    def has(self, field: str, wanted: str) -> bool:
        """Return whether a field has a value; ``2.13`` means torch 2.13.0, and ``2.1`` does not."""
        begins = tuple(f"{wanted}{mark}" for mark in ".+") if field == "torch" else ()
        values = self.values(field) or ()
        return wanted in values or any(value.startswith(begins) for value in values)


# Whether an item meets a condition on what a listing says.
_LISTED: dict[str, Callable[[Item, Any], bool]] = {
    "key": lambda item, beginnings: item.key.startswith(beginnings),
    "manifest": lambda item, names: item.key in names or item.place in names,
    "never_hit": lambda item, hit: item.key not in hit and not item.key.startswith(_PROFILE),
    "older": lambda item, seconds: item.age_s >= seconds,
    "newer": lambda item, seconds: item.age_s < seconds,
    "min_size": lambda item, size: item.size >= size,
    "max_size": lambda item, size: item.size <= size,
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The entries that meet every condition given here; all entries where there is none.

    Each has the name of the option that sets it. Times are in seconds since the last change, or use
    in a local tier. An entry with a header that cannot be read meets no condition on headers but
    ``unreadable`` or ``untrusted``; with both, either is enough.

    Attributes:
        key: keys that begin with one of these.
        manifest: keys, or names of entries below a remote.
        never_hit: the keys that were hit: chosen are entries with others, but no shape profiles, as
            their use is not recorded.
        unreadable: those that are damaged or out of place, but not those of a later release.
    """

    key: tuple[str, ...] = ()
    manifest: frozenset[str] | None = None
    older: float | None = None
    newer: float | None = None
    min_size: int | None = None
    max_size: int | None = None
    kind: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    signer: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    never_hit: frozenset[str] | None = None
    unreadable: bool = False
    untrusted: bool = False

    @property
    def needs_headers(self) -> bool:
        asked = any(getattr(self, field) for field in HEADER_FIELDS)
        return self.unreadable or self.untrusted or asked

    def may_choose(self, item: Item) -> bool:
        """Return whether the conditions on what a listing says hold."""
        wanted = ((name, getattr(self, name)) for name in _LISTED)
        return all(value in (None, ()) or _LISTED[name](item, value) for name, value in wanted)

    def chooses(self, item: Item) -> bool:
        """Return whether all conditions hold for ``item`` with its header."""
        if self.unreadable or self.untrusted:
            problem = item.problem
            is_damaged = isinstance(problem, CorruptError) and problem.where != _NEWER
            is_refused = isinstance(problem, UntrustedError)
            if not (self.unreadable and is_damaged) and not (self.untrusted and is_refused):
                return False
        asked = ((field, getattr(self, field)) for field in HEADER_FIELDS)
        return self.may_choose(item) and all(
            any(item.has(field, value) for value in values) for field, values in asked if values
        )


def read_manifest(where: str, lines: Iterable[str]) -> list[str]:
    """Return the keys, and names of objects, that a manifest has, in its order and each once.

    A line is a key, the name of an object as ``v1/3f2/KEY.0``, or what ``s3cache ls --json``
    prints of one; what follows a ``#`` is a comment.

    Args:
        where: what errors call it.

    Raises:
        ConfigError: a line is something else.
    """
    found: dict[str, None] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        text = line if line.startswith("{") else line.partition("#")[0].strip()
        if not text:
            continue
        try:
            value = json.loads(text) if text.startswith("{") else {"name": text}
            name = _NAMESPACE.sub("", value.get("name") or value["key"], count=1)
            key = entries.check_key(entries.key_of(name))
            if name != key and not name.startswith(entries.name_prefix(key)):
                raise ValueError(name)
        except (ConfigError, KeyError, RecursionError, TypeError, ValueError):
            raise ConfigError(
                f"manifest {where}, line {number}",
                f"{text[:_MANIFEST_CHARACTERS]!r} names no entry",
                "give one key to a line, or what s3cache ls --json prints",
            ) from None
        found[name] = None
    return [*found]
