"""``s3cache du``: how much there is, by what."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from s3cache.cli._choosing import (
    NOT_THERE,
    Where,
    chosen,
    entries_in,
    hits_here,
    whole_batches,
)
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output, size_text

if TYPE_CHECKING:
    from s3cache.catalog import Item, Selection

__all__ = ["du"]

_AGES = ((3600, "1 hour"), (86400, "1 day"), (7 * 86400, "7 days"), (30 * 86400, "30 days"))
_SIZES = ((64 << 10, "64 KiB"), (1 << 20, "1 MiB"), (16 << 20, "16 MiB"), (256 << 20, "256 MiB"))

_HITS = ((10, "10 or more"), (2, "2 to 9"), (1, "1"), (0, "none here"))


class _By(str, Enum):
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
        _By,
        typer.Option(
            help="What to sum up by; all but age, hits and size take a request for each entry."
        ),
    ] = _By.AGE,
) -> None:
    """Sum up how many entries there are and what they take, the largest sum first.

    Hits are those of this machine, as its last 128 processes recorded them.
    """
    heads = by not in (_By.AGE, _By.HITS, _By.SIZE)
    hits = hits_here() if by is _By.HITS else {}
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    absent: list[str] = []
    with where.open() as place, out.progress("entries") as advance:
        for batch in whole_batches(entries_in(place, selection, absent, heads=heads)):
            for item in batch:
                count = counts[_group(item, by, hits)]
                count[0] += 1
                count[1] += item.size
            advance(len(batch))
    _show(out, by, counts, absent)
    raise typer.Exit(1 if absent else 0)


def _show(out: Output, by: _By, counts: Mapping[str, list[int]], absent: list[str]) -> None:
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


def _group(item: Item, by: _By, hits: Mapping[str, int]) -> str:
    if by is _By.AGE:
        return _below(time.time() - item.modified, _AGES, "30 days or more")
    if by is _By.HITS:
        return next(name for least, name in _HITS if hits.get(item.key, 0) >= least)
    if by is _By.SIZE:
        return _below(item.size, _SIZES, "256 MiB or more")
    if item.about is None:
        return "(not readable)"
    if by is _By.KIND:
        return item.about.kind
    if by is _By.TORCH:
        return item.about.torch or "(does not say)"
    if by is _By.DEVICE:
        return " ".join(item.about.devices) or "(does not say)"
    if by is _By.TAG:
        return item.about.tag or "(none)"
    return " ".join(item.about.signers) or "(nobody)"


def _below(value: float, bounds: tuple[tuple[int, str], ...], otherwise: str) -> str:
    return next((f"below {name}" for bound, name in bounds if value < bound), otherwise)
