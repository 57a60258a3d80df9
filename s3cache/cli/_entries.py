"""``s3cache ls``, ``du`` and ``verify``: list entries, sum them up, and check them."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Optional

from typer import Option

from s3cache.cli._options import (
    NOT_THERE,
    Number,
    Where,
    entries_in,
    finish,
    hits_here,
    items_in,
    until_done,
)
from s3cache.cli._output import Output, age, size_text
from s3cache.errors import ConfigError
from s3cache.util.words import counted

if TYPE_CHECKING:
    from s3cache.manage import HeaderSummary, Item, Selection

__all__ = ["du", "ls", "verify"]

_Hits = Mapping[str, int]

# -- ls

# Sorting keeps no more entries than this in memory: those at the top.
_SORTED_AT_MOST = 1000


class _Order(str, Enum):
    AGE = "age"
    HITS = "hits"
    KEY = "key"
    KIND = "kind"
    SIZE = "size"
    TORCH = "torch"


_SORT_KEYS: dict[_Order, Callable[[Item, _Hits], Any]] = {
    _Order.AGE: lambda item, _: -item.modified,
    _Order.HITS: lambda item, hits: (-hits.get(item.key, 0), item.key),
    _Order.KEY: lambda item, _: (item.key, item.name),
    _Order.KIND: lambda item, _: (item.about.kind if item.about else "", item.key),
    _Order.SIZE: lambda item, _: -item.size,
    _Order.TORCH: lambda item, _: (item.about.torch if item.about else "", item.key),
}


def ls(
    selection: Selection,
    where: Where,
    out: Output,
    long: Annotated[
        bool, Option("--long", "-l", help="Also what headers say: one request for each entry.")
    ] = False,
    sort: Annotated[
        Optional[_Order],  # noqa: UP045 - see _options.py
        Option(help="Put the newest, largest or first on top; a thousand without --limit."),
    ] = None,
    reverse: Annotated[bool, Option("--reverse", "-r", help="Sort the other way.")] = False,
    limit: Annotated[Number, Option(help="At most so many entries.", min=1)] = None,
) -> int:
    """List entries: size, time since the last change, key and variant.

    With --long also kind, torch, device, tag and signers, and how often this machine hit the entry,
    as its last 128 processes recorded it. Entries are printed as they are found, so the bucket may
    be of any size.
    """
    if reverse and sort is None:
        raise ConfigError("option --reverse", "has nothing to reverse", "give --sort too")
    long = long or sort in (_Order.KIND, _Order.TORCH) or selection.needs_heads
    hits = hits_here() if long or sort is _Order.HITS else None
    absent: list[str] = []
    shown = 0
    with where.open() as place:
        items = items_in(place, selection, absent, heads=long)
        if sort is not None:
            by, pick = _SORT_KEYS[sort], heapq.nlargest if reverse else heapq.nsmallest
            most = limit or _SORTED_AT_MOST
            items = iter(pick(most, items, key=lambda item: by(item, hits or {})))
        for item in items:
            if shown == limit:
                break
            shown += 1
            if out.json:
                out.record(_item_as_dict(item, long, hits))
            else:
                out.line(_item_text(item, long, hits))
    out.note(counted(shown, "entry", "entries") if shown else "no entries")
    if sort is not None and limit is None and shown == _SORTED_AT_MOST:
        out.note("there may be more, which come after these: give --limit for another number")
    if hits is not None and shown:
        out.note("hits are those of this machine, as far as they are recorded")
    for name in absent:
        out.note(f"{name}: {NOT_THERE}")
    return 1 if absent else 0


def _item_text(item: Item, long: bool, hits: _Hits | None) -> str:
    text = f"{size_text(item.size):>10}  {age(time.time() - item.modified):>6}  "
    if hits is not None:
        count = hits.get(item.key, 0)
        text += f"{count:>5} {'hit ' if count == 1 else 'hits'}  "
    if long:
        kind, torch, devices, tag, signers = ("?", "-", "", "", "")
        if about := item.about:
            kind, torch, tag = about.kind, about.torch or "-", about.tag or "-"
            devices, signers = ",".join(about.devices) or "-", ",".join(about.signers) or "unsigned"
        text += f"{kind:6}  {torch:14}  {devices:5}  {tag:8}  {signers:12}  "
    problem = "" if item.problem is None else f"  ({item.problem})"
    return f"{text}{item.key}  {item.name.rpartition('.')[2]}{problem}"


def _item_as_dict(item: Item, long: bool, hits: _Hits | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: getattr(item, name) for name in ("key", "name", "size", "modified")
    }
    if hits is not None:
        found["hits_here"] = hits.get(item.key, 0)
    if long:
        problem = None if item.problem is None else str(item.problem)
        found |= {"about": item.about, "problem": problem}
    return found


# -- du

_AGES = ((3600, "1 hour"), (86400, "1 day"), (7 * 86400, "7 days"), (30 * 86400, "30 days"))
_SIZES = ((64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (16 << 20, "16 MiB"), (256 << 20, "256 MiB"))
_HITS = ((10, "10 or more"), (2, "2 to 9"), (1, "1"), (0, "none here"))


class _GroupBy(str, Enum):
    AGE = "age"
    DEVICE = "device"
    HITS = "hits"
    KIND = "kind"
    SIGNER = "signer"
    SIZE = "size"
    TAG = "tag"
    TORCH = "torch"


# What takes a look at the header.
_GROUPS_BY_HEADER: dict[_GroupBy, Callable[[HeaderSummary], str]] = {
    _GroupBy.DEVICE: lambda about: " ".join(about.devices) or "(does not say)",
    _GroupBy.KIND: lambda about: about.kind,
    _GroupBy.SIGNER: lambda about: " ".join(about.signers) or "(nobody)",
    _GroupBy.TAG: lambda about: about.tag or "(none)",
    _GroupBy.TORCH: lambda about: about.torch or "(does not say)",
}


def du(
    selection: Selection,
    where: Where,
    out: Output,
    by: Annotated[
        _GroupBy,
        Option(help="Group by; all but age, hits and size take one request for each entry."),
    ] = _GroupBy.AGE,
) -> int:
    """Sum up the number and the size of entries, the largest sum first.

    Hits are those of this machine, as its last 128 processes recorded them.
    """
    hits = hits_here() if by is _GroupBy.HITS else {}
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    absent: list[str] = []
    with where.open() as place, out.progress("entries") as advance:
        for item in items_in(place, selection, absent, heads=by in _GROUPS_BY_HEADER):
            group = sums[_group_of(item, by, hits)]
            group[0] += 1
            group[1] += item.size
            advance(1)
    rows = sorted(sums.items(), key=lambda row: (-row[1][1], row[0]))
    count, size = (sum(group[at] for group in sums.values()) for at in (0, 1))
    if out.json:
        groups = [{by.value: name, "entries": n, "bytes": total} for name, (n, total) in rows]
        found = {"by": by.value, "groups": groups, "entries": count, "bytes": size}
        out.record({**found, "absent": absent})
    else:
        shown = [(name, str(n), size_text(total)) for name, (n, total) in rows]
        out.table([by.value, ">entries", ">size"], [*shown, ("all", str(count), size_text(size))])
        for name in absent:
            out.note(f"{name}: {NOT_THERE}")
    return 1 if absent else 0


def _group_of(item: Item, by: _GroupBy, hits: _Hits) -> str:
    if of_header := _GROUPS_BY_HEADER.get(by):
        return "(not readable)" if item.about is None else of_header(item.about)
    if by is _GroupBy.HITS:
        return next(name for least, name in _HITS if hits.get(item.key, 0) >= least)
    if by is _GroupBy.AGE:
        return _below(time.time() - item.modified, _AGES)
    return _below(item.size, _SIZES)


def _below(value: float, bounds: tuple[tuple[int, str], ...]) -> str:
    names = (f"below {name}" for bound, name in bounds if value < bound)
    return next(names, f"{bounds[-1][1]} or more")


# -- verify


def verify(selection: Selection, where: Where, out: Output) -> int:
    """Read every entry whole, and check all digests, and signatures where a key is trusted.

    Exits with 1 if anything is damaged, out of place or not trusted. To remove such entries:
    s3cache gc --unreadable --untrusted --delete.
    """
    from s3cache import manage

    absent: list[str] = []
    with where.open() as place, out.progress("verified") as advance:
        batches = entries_in(place, selection, absent)
        tally = until_done(
            manage.verify(place.store, batches, admit=place.policy.check, advance=advance)
        )
    level = place.policy.level
    checked = "" if level == "off" else ", signatures too"
    return finish(
        out,
        tally,
        absent,
        lambda sum_: f"{sum_.done} sound{checked} ({size_text(sum_.size)}), {sum_.failed} not",
        trust=level,
    )
