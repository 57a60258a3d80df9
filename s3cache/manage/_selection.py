"""Select entries by name, size, age and header, and read manifests."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from s3cache import entries
from s3cache.errors import ConfigError, CorruptError, S3CacheError, UntrustedError
from s3cache.seam import hints

_NAMESPACE = re.compile(r"[0-9a-f]{16}/(?=v1/)")
# The subject of a CorruptError for a frame of a later release, which may be sound.
_NEWER = "frame version"
# Prefixes of keys with entries that are used without a record.
_UNHIT = hints()

#: Fields of headers for selecting and grouping entries.
HEADER_FIELDS = ("kind", "torch", "device", "tag", "signer")


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a store with its header, if it was read, or the error in it.

    ``modified`` is a Unix time; in the local tier it is the last use.
    """

    name: str
    size: int
    modified: float
    about: Mapping[str, Any] | None = None
    problem: S3CacheError | None = None

    @property
    def place(self) -> str:
        """Return the name without the local tier's directory for the remote."""
        return _NAMESPACE.sub("", self.name, count=1)

    @property
    def key(self) -> str:
        return entries.key_of(self.name)

    @property
    def age_s(self) -> float:
        return time.time() - self.modified

    def values(self, field: str) -> tuple[str, ...]:
        """Return the values of a header field: an entry may have several signers."""
        value: Any = self.about[field] if self.about else ()
        return tuple(filter(None, (value,) if isinstance(value, str) else value))

    def has(self, field: str, wanted: str) -> bool:
        """Return whether a field has a value; ``2.13`` matches torch 2.13.0, ``2.1`` does not."""
        begins = tuple(f"{wanted}{mark}" for mark in ".+") if field == "torch" else ()
        return any(value == wanted or value.startswith(begins) for value in self.values(field))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Conditions on entries; an entry must meet all of them. Without conditions, all entries match.

    A condition has the name of its option. Times are in seconds since the last change (in a local
    tier: the last use) until ``now``. An entry with an unreadable header meets no condition on
    headers except ``unreadable`` or ``untrusted``; if both are set, one of them is enough.

    Attributes:
        key: prefixes of keys.
        manifest: keys, or names of entries in a remote.
        never_hit: the keys that were hit; entries under other keys match.
        unreadable: damaged or misplaced entries, but not those of a later release.
    """

    key: tuple[str, ...] = ()
    manifest: frozenset[str] | None = None
    never_hit: frozenset[str] | None = None
    older: float = -math.inf
    newer: float = math.inf
    min_size: int = 0
    max_size: float = math.inf
    kind: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    signer: tuple[str, ...] = ()
    unreadable: bool = False
    untrusted: bool = False
    now: float = field(default_factory=time.time, compare=False)

    @property
    def asked(self) -> dict[str, tuple[str, ...]]:
        """Return the wanted values of headers, by field."""
        return {field: values for field in HEADER_FIELDS if (values := getattr(self, field))}

    @property
    def needs_headers(self) -> bool:
        return self.unreadable or self.untrusted or bool(self.asked)

    def may_choose(self, item: Item) -> bool:
        """Return whether ``item`` meets the conditions that a listing can decide."""
        key, named, hit = item.key, self.manifest, self.never_hit
        age_s = self.now - item.modified
        return (
            (not self.key or key.startswith(self.key))
            and (named is None or key in named or item.place in named)
            and (hit is None or not (key in hit or key.startswith(_UNHIT)))
            and self.older <= age_s < self.newer
            and self.min_size <= item.size <= self.max_size
        )

    def chooses(self, item: Item) -> bool:
        """Return whether ``item``, with its header, meets all conditions."""
        problem = item.problem
        is_damaged = isinstance(problem, CorruptError) and problem.where != _NEWER
        is_refused = isinstance(problem, UntrustedError)
        has_problem = (self.unreadable and is_damaged) or (self.untrusted and is_refused)
        if (self.unreadable or self.untrusted) and not has_problem:
            return False
        return self.may_choose(item) and all(
            any(item.has(field, value) for value in values) for field, values in self.asked.items()
        )


def read_manifest(where: str, lines: Iterable[str]) -> frozenset[str]:
    """Return the keys and names of objects in a manifest.

    A line is a key, the name of an object (``v1/3/KEY.0``), or a line of ``s3cache ls --json``.
    Text after a ``#`` is a comment.

    Args:
        where: the name of the manifest in errors.

    Raises:
        ConfigError: a line is none of these.
    """
    found = set()
    for number, line in enumerate(lines, 1):
        is_listed = line.startswith("{")
        text = line if is_listed else line.partition("#")[0].strip()
        if not text:
            continue
        try:
            name = json.loads(text)["name"] if is_listed else text
            name = _NAMESPACE.sub("", name, count=1)
            key = entries.check_key(entries.key_of(name))
        except (ConfigError, KeyError, RecursionError, TypeError, ValueError):
            key = ""
        if not key or (name != key and not name.startswith(entries.name_prefix(key))):
            thing, problem = f"manifest {where}, line {number}", f"{text[:60]!r} names no entry"
            fix = "write one key per line, or the output of s3cache ls --json"
            raise ConfigError(thing, problem, fix)
        found.add(name)
    return frozenset(found)
