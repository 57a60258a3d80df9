"""``s3cache ls``, ``du`` and ``verify``: list entries, sum them up, and check them."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from s3cache._words import counted
from s3cache.cli._options import (
    NOT_THERE,
    Where,
    chosen,
    entries_in,
    grouped,
    hits_here,
    until_done,
    whole_batches,
)
from s3cache.cli._output import Output, age, size_text
from s3cache.errors import ConfigError

if TYPE_CHECKING:
    from s3cache.manage import Item, Place, Selection

__all__ = ["du", "ls", "verify"]

# ruff: noqa: UP045 - see _options.py

# -- ls


# What is sorted is kept: of more than that, only those at the top are.
_SORTED_AT_MOST = 1000


class _Order(str, Enum):
    AGE = "age"
    HITS = "hits"
    KEY = "key"
    KIND = "kind"
    SIZE = "size"
    TORCH = "torch"


@grouped(selection=chosen, where=Where, out=Output)
def ls(
    selection: Selection,
    where: Where,
    out: Output,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="What headers say, too: a request for each entry.")
    ] = False,
    sort: Annotated[
        Optional[_Order],
        typer.Option(help="The newest, largest or first ones on top; a thousand without --limit."),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="Sort the other way.")] = False,
    limit: Annotated[Optional[int], typer.Option(help="So many at most.", min=1)] = None,
) -> None:
    """List entries: size, time since the last change, key and variant.

    With --long also kind, torch, device, tag, signers, and how often this machine has hit it: as
    its last 128 processes recorded it, whatever other machines do. It prints as it goes, from
    buckets of any size.
    """
    if reverse and sort is None:
        raise ConfigError("option --reverse", "has nothing to reverse", "give --sort too")
    long = long or sort in (_Order.KIND, _Order.TORCH) or selection.needs_heads
    hits = hits_here() if long or sort is _Order.HITS else None
    absent: list[str] = []
    with where.open() as place:
        items = _items(place, selection, long, absent)
        if sort is not None:
            items = iter(_sorted(items, sort, reverse, limit or _SORTED_AT_MOST, hits))
        shown = 0
        for item in items:
            if shown == limit:
                break
            shown += 1
            _show_item(out, item, long, hits)
    out.note(counted(shown, "entry", "entries") if shown else "no entries")
    if sort is not None and limit is None and shown == _SORTED_AT_MOST:
        out.note("there may be more, which come after these: give --limit for another number")
    if hits is not None and shown:
        out.note("hits are those of this machine, as far as they are recorded")
    for name in absent:
        out.note(f"{name}: {NOT_THERE}")
    raise typer.Exit(1 if absent else 0)


def _items(place: Place, selection: Selection, long: bool, absent: list[str]) -> Iterator[Item]:
    for batch in whole_batches(entries_in(place, selection, absent, heads=long)):
        yield from batch


def _sorted(
    items: Iterable[Item], by: _Order, reverse: bool, limit: int, hits: Mapping[str, int] | None
) -> list[Item]:
    values = {
        _Order.HITS: lambda item: (-(hits or {}).get(item.key, 0), item.key),
        _Order.AGE: lambda item: -item.modified,
        _Order.SIZE: lambda item: -item.size,
        _Order.KEY: lambda item: (item.key, item.name),
        _Order.KIND: lambda item: (item.about.kind if item.about else "", item.key),
        _Order.TORCH: lambda item: (item.about.torch if item.about else "", item.key),
    }
    pick = heapq.nlargest if reverse else heapq.nsmallest
    return pick(limit, items, key=values[by])


def _show_item(out: Output, item: Item, long: bool, hits: Mapping[str, int] | None) -> None:
    if out.json:
        out.record(_item_as_dict(item, long, hits))
        return
    variant = item.name.rpartition(".")[2]
    text = f"{size_text(item.size):>10}  {age(time.time() - item.modified):>6}  "
    if hits is not None:
        count = hits.get(item.key, 0)
        text += f"{count:>5} {'hit ' if count == 1 else 'hits'}  "
    if long:
        about = item.about
        parts = ("?", "", "", "", "") if about is None else (
            about.kind, about.torch, ",".join(about.devices) or "-", about.tag or "-",
            ",".join(about.signers) or "unsigned",
        )  # fmt: skip
        kind, torch, devices, tag, signers = parts
        text += f"{kind:6}  {torch or '-':14}  {devices:5}  {tag:8}  {signers:12}  "
    text += f"{item.key}  {variant}"
    if item.problem is not None:
        text += f"  ({item.problem})"
    out.line(text)


def _item_as_dict(item: Item, long: bool, hits: Mapping[str, int] | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "key": item.key,
        "name": item.name,
        "size": item.size,
        "modified": item.modified,
    }
    if hits is not None:
        found["hits_here"] = hits.get(item.key, 0)
    if long:
        found["about"] = item.about
        found["problem"] = None if item.problem is None else str(item.problem)
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


@grouped(selection=chosen, where=Where, out=Output)
def du(
    selection: Selection,
    where: Where,
    out: Output,
    by: Annotated[
        _GroupBy,
        typer.Option(
            help="What to sum up by; all but age, hits and size take a request for each entry."
        ),
    ] = _GroupBy.AGE,
) -> None:
    """Sum up how many entries there are and what they take, the largest sum first.

    Hits are those of this machine, as its last 128 processes recorded them.
    """
    heads = by not in (_GroupBy.AGE, _GroupBy.HITS, _GroupBy.SIZE)
    hits = hits_here() if by is _GroupBy.HITS else {}
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    absent: list[str] = []
    with where.open() as place, out.progress("entries") as advance:
        for batch in whole_batches(entries_in(place, selection, absent, heads=heads)):
            for item in batch:
                count = counts[_group_of(item, by, hits)]
                count[0] += 1
                count[1] += item.size
            advance(len(batch))
    _show_sums(out, by, counts, absent)
    raise typer.Exit(1 if absent else 0)


def _show_sums(
    out: Output, by: _GroupBy, counts: Mapping[str, list[int]], absent: list[str]
) -> None:
    rows = sorted(counts.items(), key=lambda each: (-each[1][1], each[0]))
    total = [sum(count[at] for count in counts.values()) for at in (0, 1)]
    if out.json:
        groups = [{by.value: name, "entries": n, "bytes": size} for name, (n, size) in rows]
        sums = {"entries": total[0], "bytes": total[1]}
        out.record({"by": by.value, "groups": groups, **sums, "absent": absent})
        return
    shown = [(name, str(n), size_text(size)) for name, (n, size) in rows]
    out.table(
        [by.value, ">entries", ">size"], [*shown, ("all", str(total[0]), size_text(total[1]))]
    )
    for name in absent:
        out.note(f"{name}: {NOT_THERE}")


def _group_of(item: Item, by: _GroupBy, hits: Mapping[str, int]) -> str:
    if by is _GroupBy.AGE:
        return _below(time.time() - item.modified, _AGES, "30 days or more")
    if by is _GroupBy.HITS:
        return next(name for least, name in _HITS if hits.get(item.key, 0) >= least)
    if by is _GroupBy.SIZE:
        return _below(item.size, _SIZES, "256 MiB or more")
    if item.about is None:
        return "(not readable)"
    if by is _GroupBy.KIND:
        return item.about.kind
    if by is _GroupBy.TORCH:
        return item.about.torch or "(does not say)"
    if by is _GroupBy.DEVICE:
        return " ".join(item.about.devices) or "(does not say)"
    if by is _GroupBy.TAG:
        return item.about.tag or "(none)"
    return " ".join(item.about.signers) or "(nobody)"


def _below(value: float, bounds: tuple[tuple[int, str], ...], otherwise: str) -> str:
    return next((f"below {name}" for bound, name in bounds if value < bound), otherwise)


# -- verify


@grouped(selection=chosen, where=Where, out=Output)
def verify(selection: Selection, where: Where, out: Output) -> None:
    """Read every entry whole, and check all digests; signatures too, where a key is trusted.

    Exit code 1 if anything is damaged, out of place or not trusted. To remove that: s3cache gc
    --unreadable --untrusted --delete.
    """
    from s3cache import manage

    with where.open() as place, out.progress("verified") as advance:
        absent: list[str] = []
        batches = entries_in(place, selection, absent)
        tally = until_done(
            manage.verify(place.store, batches, admit=place.policy.check, advance=advance)
        )
        for name in absent:
            tally.fail(name, NOT_THERE)
    if out.json:
        out.record({"trust": place.policy.level, **vars(tally)})
    else:
        for name, why in tally.failures:
            out.line(f"{name}: {why}")
        if tally.failed > len(tally.failures):
            out.line(f"and {tally.failed - len(tally.failures)} more")
        asked = "" if place.policy.level == "off" else ", signatures too"
        out.line(f"{tally.done} sound{asked} ({size_text(tally.size)}), {tally.failed} not")
    raise typer.Exit(1 if tally.failed else 0)
