"""Choose entries by their names, sizes, ages and headers, and read manifests that name them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from s3cache import entries
from s3cache.errors import ConfigError, CorruptError, S3CacheError, UntrustedError

# The local tier keeps the entries of each remote below a directory of their own.
_NAMESPACE = re.compile(r"[0-9a-f]{16}/(?=v1/)")
# Where a CorruptError says that a later release wrote the frame: it may well be sound.
_NEWER = "frame version"
# The keys of shape profiles begin so, and no others.
_PROFILE = "p"
_MANIFEST_CHARACTERS = 60
# Values of one field that are remembered, to suggest others for one that no entry has.
_REMEMBERED_AT_MOST = 20


@dataclass(frozen=True, slots=True)
class HeaderSummary:
    """The fields of an entry's header by which one chooses.

    Attributes:
        kind: ``aot``, ``fx`` or ``shapes``.
        torch: the release that made it; ``""`` where the header has none.
        tag: torch's ``cache_key_tag``.
        devices: that it has code for, as ``cuda``; none where the header has none.
        signers: names of those who have signed it, as the entry says; proven by nothing.
        created_s: Unix time.
    """

    kind: str
    variant: str
    schema: int
    created_s: float
    producer: str
    torch: str = ""
    tag: str = ""
    signers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """One object.

    Attributes:
        name: in its store.
        size: bytes.
        modified: Unix time; in the local tier that of its last use.
        about: its header, if it was read and could be used.
        problem: why the header could not be used: an ``UntrustedError`` or ``CorruptError``.
    """

    name: str
    size: int
    modified: float
    about: HeaderSummary | None = None
    problem: S3CacheError | None = None

    @property
    def place(self) -> str:
        """Return its name below the remote that it belongs to."""
        return _NAMESPACE.sub("", self.name, count=1)

    @property
    def key(self) -> str:
        """Return the key that it is under, if it is an entry."""
        return entries.key_of(self.name)


class _Field(NamedTuple):
    """A field of headers: its values, and whether one of them is a value that was asked for."""

    values: Callable[[HeaderSummary], tuple[str, ...]]
    matches: Callable[[str, str], bool] = str.__eq__


def _is_release(version: str, wanted: str) -> bool:
    """Return whether ``2.13`` means ``2.13.0+cpu``; ``2.1`` does not mean ``2.13``."""
    return version == wanted or version.startswith((f"{wanted}.", f"{wanted}+"))


# By the names of a selection's attributes.
_FIELDS = {
    "kinds": _Field(lambda about: (about.kind,)),
    "torch": _Field(lambda about: (about.torch,), _is_release),
    "tags": _Field(lambda about: (about.tag,)),
    "signers": _Field(lambda about: about.signers),
    "devices": _Field(lambda about: about.devices),
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The entries for which every condition given here holds; without any, all entries.

    An entry that cannot be read is chosen by its key, age and size, or as ``unreadable`` or
    ``untrusted``, and by nothing else.

    Attributes:
        keys: those with a key that begins with one of these.
        named: those with one of these as their key, or as their own name below a remote.
        older_s, newer_s: by the time of their last change, or use in a local tier.
        min_bytes, max_bytes: by their size, both included.
        kinds, tags, signers: those that have one of these.
        torch: those made by a release that begins so, as ``2.12`` or ``2.12.1``.
        devices: those with code for one of these.
        but_keys: those with none of these keys, which were hit. Leaves out shape profiles, as
            their use is not recorded.
        unreadable: those that are damaged or out of place, but not those of a later release.
        untrusted: those that the trust policy refuses. With ``unreadable`` either is enough.
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
        """Return whether there is no condition."""
        return self == Selection()

    @property
    def needs_heads(self) -> bool:
        """Return whether a condition is about headers."""
        return self.unreadable or self.untrusted or any(wanted for _, wanted in self._asked())

    def _asked(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        for name in _FIELDS:
            yield name, getattr(self, name)

    def may_choose(self, item: Item) -> bool:
        """Return whether the conditions on what a listing tells hold."""
        age_s = self.now() - item.modified
        return (
            (not self.keys or item.key.startswith(self.keys))
            and (self.named is None or not self.named.isdisjoint((item.key, item.place)))
            and (self.but_keys is None or self._was_not_hit(item.key))
            and (self.older_s is None or age_s >= self.older_s)
            and (self.newer_s is None or age_s < self.newer_s)
            and (self.min_bytes is None or item.size >= self.min_bytes)
            and (self.max_bytes is None or item.size <= self.max_bytes)
        )

    def _was_not_hit(self, key: str) -> bool:
        return key not in (self.but_keys or ()) and not key.startswith(_PROFILE)

    def chooses(self, item: Item) -> bool:
        """Return whether all conditions hold for ``item`` with its header."""
        problem, about = item.problem, item.about
        is_wanted = not (self.unreadable or self.untrusted) or (
            (self.untrusted and isinstance(problem, UntrustedError))
            or (self.unreadable and isinstance(problem, CorruptError) and problem.where != _NEWER)
        )
        return (
            self.may_choose(item)
            and is_wanted
            and all(
                not wanted or (about is not None and _has_one(name, about, wanted))
                for name, wanted in self._asked()
            )
        )


def _has_one(name: str, about: HeaderSummary, wanted: Iterable[str]) -> bool:
    values, matches = _FIELDS[name]
    return any(matches(value, each) for value in values(about) for each in wanted)


# -- what no entry has


class Unmatched(NamedTuple):
    """A value that a selection asks for, and that no entry has.

    Attributes:
        field: of the selection.
        value: what was asked for.
        there: what entries have instead, if anything: some of it, where it is much.
    """

    field: str
    value: str
    there: tuple[str, ...]


class FilterFeedback:
    """Collect what a selection asks for and no entry has: it may be misspelt.

    Args:
        absent: gets each name of the selection that has no entry, at the end of a scan.
    """

    def __init__(self, selection: Selection, absent: list[str] | None = None) -> None:
        self.absent = [] if absent is None else absent
        self._asked = [(name, each) for name, wanted in selection._asked() for each in wanted]
        self._found: set[tuple[str, str]] = set()
        self._there: dict[str, set[str]] = {name: set() for name in _FIELDS}
        self._is_empty = True

    def note(self, about: HeaderSummary) -> None:
        """Note one header, whether or not its entry is chosen."""
        self._is_empty = False
        for name, there in self._there.items():
            if len(there) < _REMEMBERED_AT_MOST:
                there.update(filter(None, _FIELDS[name].values(about)))
        self._found |= {(name, each) for name, each in self._asked if _has_one(name, about, [each])}

    def unmatched(self) -> list[Unmatched]:
        """Return what no entry has; nothing if there were no entries."""
        return [
            Unmatched(name, value, tuple(sorted(self._there[name])))
            for name, value in dict.fromkeys(self._asked)
            if not self._is_empty and (name, value) not in self._found
        ]


# -- manifests


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
        name = _NAMESPACE.sub("", _name_in(text), count=1)
        if not _is_name(name):
            raise ConfigError(
                f"manifest {where}, line {number}",
                f"{text[:_MANIFEST_CHARACTERS]!r} names no entry",
                "give one key to a line, or what s3cache ls --json prints",
            )
        found[name] = None
    return [*found]


def _name_in(text: str) -> str:
    if not text.startswith("{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    name = value.get("name") or value.get("key")
    return name if isinstance(name, str) else ""


def _is_name(name: str) -> bool:
    key = entries.key_of(name)
    try:
        entries.check_key(key)
    except ConfigError:
        return False
    return name == key or name.startswith(entries.name_prefix(key))
