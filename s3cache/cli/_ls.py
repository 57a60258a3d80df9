"""``s3cache ls``: entries, one to a line."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from s3cache._words import counted
from s3cache.cli._choosing import (
    NOT_THERE,
    Where,
    chosen,
    entries_in,
    hits_here,
    whole_batches,
)
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output, age, size_text
from s3cache.errors import ConfigError

if TYPE_CHECKING:
    from s3cache.catalog import Item, Place, Selection

__all__ = ["ls"]

# ruff: noqa: UP045 - see _choosing.py

# What is sorted is kept: of more than that, only those at the top are.
_SORTED_AT_MOST = 1000


class _By(str, Enum):
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
        Optional[_By],
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
    long = long or sort in (_By.KIND, _By.TORCH) or selection.needs_heads
    hits = hits_here() if long or sort is _By.HITS else None
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
            _show(out, item, long, hits)
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
    items: Iterable[Item], by: _By, reverse: bool, limit: int, hits: Mapping[str, int] | None
) -> list[Item]:
    values = {
        _By.HITS: lambda item: (-(hits or {}).get(item.key, 0), item.key),
        _By.AGE: lambda item: -item.modified,
        _By.SIZE: lambda item: -item.size,
        _By.KEY: lambda item: (item.key, item.name),
        _By.KIND: lambda item: (item.about.kind if item.about else "", item.key),
        _By.TORCH: lambda item: (item.about.torch if item.about else "", item.key),
    }
    pick = heapq.nlargest if reverse else heapq.nsmallest
    return pick(limit, items, key=values[by])


def _show(out: Output, item: Item, long: bool, hits: Mapping[str, int] | None) -> None:
    if out.json:
        out.record(_described(item, long, hits))
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


def _described(item: Item, long: bool, hits: Mapping[str, int] | None) -> dict[str, Any]:
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
