"""``s3cache ls``, ``du``, ``stats``, ``verify`` and ``inspect``: what entries there are."""

from __future__ import annotations

import datetime as dt
import heapq
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from typer import Argument, Exit, Option

from s3cache import manage
from s3cache.cli._options import (
    Filters,
    Output,
    Where,
    check_file,
    finish,
    hits_here,
    items_of,
    note_missing,
    size_text,
    until_done,
)
from s3cache.errors import ConfigError, UntrustedError
from s3cache.settings import Settings
from s3cache.util.text import counted, printable

if TYPE_CHECKING:
    from s3cache.frame import Head
    from s3cache.trust import Policy

_Hits: TypeAlias = Mapping[str, int]
_Order: TypeAlias = Literal["age", "hits", "key", "kind", "size", "torch"]
_Group: TypeAlias = Literal["age", "device", "hits", "kind", "signer", "size", "tag", "torch"]

# What each order puts on top.
_ORDERS: dict[_Order, Callable[[manage.Item, _Hits], Any]] = {
    "age": lambda item, _: -item.modified,
    "hits": lambda item, hits: (-hits.get(item.key, 0), item.key),
    "key": lambda item, _: (item.key, item.name),
    "kind": lambda item, _: (item.values("kind") or (), item.key),
    "size": lambda item, _: -item.size,
    "torch": lambda item, _: (item.values("torch") or (), item.key),
}
# Groupings by something that is not a header field: its value, and the bounds of each group.
_RANGES: dict[str, tuple[Callable[[manage.Item, _Hits], float], dict[str, float]]] = {
    "age": (lambda item, _: item.age_s, {
        "below 1 hour": 3600, "below 1 day": 86400, "below 7 days": 7 * 86400,
        "below 30 days": 30 * 86400, "30 days or more": float("inf"),
    }),
    "size": (lambda item, _: item.size, {
        "below 64 KiB": 64 << 10, "below 1 MiB": 1 << 20, "below 16 MiB": 16 << 20,
        "below 256 MiB": 256 << 20, "256 MiB or more": float("inf"),
    }),
    "hits": (lambda item, hits: hits.get(item.key, 0), {
        "none here": 1, "1": 2, "2 to 9": 10, "10 or more": float("inf"),
    }),
}  # fmt: skip
# Sorting keeps no more entries than this in memory: those at the top.
_SORTED_AT_MOST = 1000
# The columns of `--long`, and their widths.
_LONG = {"kind": 6, "torch": 14, "device": 5, "tag": 8, "signer": 12}


def ls(
    filters: Filters,
    where: Where,
    out: Output,
    long: bool = Option(
        False, "--long", "-l", help="Also what headers say: one request for each entry."
    ),
    sort: _Order | None = Option(
        None, help="Put the newest, largest or first on top; a thousand without --limit."
    ),
    reverse: bool = Option(False, "--reverse", "-r", help="Sort the other way."),
    limit: int | None = Option(None, help="At most so many entries.", min=1),
) -> int:
    """List entries: size, time since the last change, key and variant.

    With --long also kind, torch, device, tag and signers, and how often this machine hit the entry,
    as its last 128 processes recorded it. Entries are printed as they are found, so the bucket may
    be of any size.
    """
    if reverse and sort is None:
        raise ConfigError("option --reverse", "has nothing to reverse", "give --sort too")
    selection = filters.selection()
    long = long or sort in ("kind", "torch") or selection.needs_headers
    hits = hits_here() if long or sort == "hits" else None
    shown = 0
    with where.open() as place:
        scan = manage.Scan(place, selection, headers=long)
        items: Iterable[manage.Item] = items_of(scan)
        if sort is not None:
            order, pick = _ORDERS[sort], heapq.nlargest if reverse else heapq.nsmallest
            most = limit or _SORTED_AT_MOST
            items = pick(most, items, key=lambda item: order(item, hits or {}))
        for item in items:
            if shown == limit:
                break
            shown += 1
            if not out.json:
                out.line(_item_text(item, long, hits))
                continue
            names = ("key", "name", "size", "modified", *(("about", "problem") if long else ()))
            found = {name: getattr(item, name) for name in names}
            out.record(found if hits is None else {**found, "hits_here": hits.get(item.key, 0)})
    out.note(counted(shown, "entry", "entries") if shown else "no entries")
    if sort is not None and limit is None and shown == _SORTED_AT_MOST:
        out.note("there may be more, which come after these: give --limit for another number")
    if hits is not None and shown:
        out.note("hits are those of this machine, as far as they are recorded")
    return note_missing(out, scan)


def _item_text(item: manage.Item, long: bool, hits: _Hits | None) -> str:
    cells = [f"{size_text(item.size):>10}", f"{_age_text(item.age_s):>6}"]
    if hits is not None:
        count = hits.get(item.key, 0)
        cells.append(f"{count:>5} {'hit ' if count == 1 else 'hits'}")
    for field, width in _LONG.items() if long else ():
        values = item.values(field)
        cells.append(f"{'?' if values is None else ','.join(values) or '-':{width}}")
    cells += [item.key, item.name.rpartition(".")[2]]
    if item.problem is not None:
        cells.append(f"({item.problem})")
    return "  ".join(cells)


def _age_text(seconds: float) -> str:
    """Return how long ago something was, for people, as in ``3 h``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _group_of(item: manage.Item, by: _Group, hits: _Hits) -> str:
    if by in _RANGES:
        value, bounds = _RANGES[by]
        return next(name for name, bound in bounds.items() if value(item, hits) < bound)
    values = item.values(by)
    return "(not readable)" if values is None else " ".join(values) or "(none)"


def du(
    filters: Filters,
    where: Where,
    out: Output,
    by: _Group = Option(
        "age", help="Group by; all but age, hits and size take one request for each entry."
    ),
) -> int:
    """Sum up the number and the size of entries, the largest sum first.

    Hits are those of this machine, as its last 128 processes recorded them.
    """
    selection = filters.selection()
    hits = hits_here() if by == "hits" else {}
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    with where.open() as place, out.progress("entries") as advance:
        scan = manage.Scan(place, selection, headers=by not in _RANGES)
        for item in items_of(scan):
            group = sums[_group_of(item, by, hits)]
            group[0] += 1
            group[1] += item.size
            advance(1)
    rows = sorted(sums.items(), key=lambda row: (-row[1][1], row[0]))
    count, size = (sum(group[at] for group in sums.values()) for at in (0, 1))
    code = note_missing(out, scan)
    if out.json:
        groups = [{by: name, "entries": n, "bytes": total} for name, (n, total) in rows]
        found = {"by": by, "groups": groups, "entries": count, "bytes": size}
        out.record({**found, "absent": scan.absent})
    else:
        shown = [(name, str(n), size_text(total)) for name, (n, total) in rows]
        out.table([by, ">entries", ">size"], [*shown, ("all", str(count), size_text(size))])
    return code


def stats(where: Where, out: Output) -> None:
    """Count the entries in the remote and in the local tier, and the uploads that are pending.

    With --local it counts the local tier only. Hits and misses are counted by each process that
    compiles: with S3CACHE_SUMMARY=1 it prints them at its end.
    """
    found: dict[str, Any] = {}
    settings, _ = Settings.load(where.url)
    if settings.local:
        with manage.open_place(where.url, in_tier=True, of_all=True) as place:
            found["local"] = {
                **_totals(place),
                "directory": settings.local_dir,
                "max_bytes": settings.local_max_bytes,
                "max_files": settings.local_max_files,
                "to_upload": len(until_done(place.to_upload())),
            }
    if settings.url is not None and not where.local:
        with manage.open_place(where.url) as place:
            found["remote"] = {**_totals(place), "url": place.store.url}
    if out.json:
        out.record(found)
        return
    for tier, counts in found.items():
        out.line(f"{tier}:")
        texts = {n: size_text(value) if "bytes" in n else value for n, value in counts.items()}
        out.table((), [(f"  {name}", text) for name, text in texts.items()])


def _totals(place: manage.Place) -> dict[str, int]:
    entries = size = firsts = 0
    here: set[str] = set()
    for item in items_of(manage.Scan(place)):
        entries += 1
        size += item.size
        # There is one first entry to a key. A local tier may have others only, and is bounded.
        if place.is_local:
            here.add(item.name.rpartition(".")[0])
        else:
            firsts += item.name.endswith(".0")
    return {"entries": entries, "keys": len(here) if place.is_local else firsts, "bytes": size}


def verify(filters: Filters, where: Where, out: Output) -> int:
    """Read every entry whole, and check all digests, and signatures where a key is trusted.

    Exits with 1 if anything is damaged, out of place or not trusted. To remove such entries:
    s3cache gc --unreadable --untrusted --delete.
    """
    selection = filters.selection()
    with where.open() as place, out.progress("verified") as advance:
        scan = manage.Scan(place, selection)
        result = until_done(manage.verify(scan, advance))
    level = place.policy.level
    checked = "" if level == "off" else ", signatures too"
    return finish(
        out, scan, result, f"{{done}} sound{checked} ({{size}}), {{failed}} not", trust=level
    )


# An object of a store: its URL up to where its entries begin, the rest, and options.
_OBJECT = re.compile(r"(\w+://[^?]*?)/(v1/[0-9a-f]{3}/[^/?]+)(\?.*)?")


def inspect(
    where: Where,
    out: Output,
    target: str = Argument(
        ...,
        metavar="KEY|FILE|URL",
        help="A key or the beginning of one, a file, or the URL of an object.",
    ),
) -> None:
    """Show what an entry says of itself: key, guards, kernels, times, signatures, its graph.

    Nothing is unpickled, and torch is not needed. The header is verified; s3cache verify checks the
    rest.
    """
    from s3cache import frame

    if "://" not in target and (os.sep in target or os.path.isfile(target)):
        policy = Settings.load()[0].trust_policy()
        with open(check_file(f"file {target}", target), "rb") as file:
            _show(out, target, frame.decode_head(file.read(2 * frame.MAX_HEADER_BYTES)), policy)
    elif is_object := _OBJECT.fullmatch(target):
        with manage.open_place(is_object[1] + (is_object[3] or "")) as place:
            _show_all(out, place, [is_object[2]], target)
    elif "://" in target:
        fix = "give scheme://.../v1/abc/key.0, or a key and --url"
        raise ConfigError("the URL", "is not that of an entry", fix)
    else:
        with where.open() as place:
            _show_all(out, place, _names_of(place, target), target)


def _names_of(place: manage.Place, key: str) -> list[str]:
    """Return the names of all entries under ``key``, or under the only key that begins so."""
    whole = manage.Selection(manifest=frozenset({key}))  # one request
    if names := [item.name for item in items_of(manage.Scan(place, whole))]:
        return names
    found: dict[str, list[str]] = defaultdict(list)
    for item in items_of(manage.Scan(place, manage.Selection(key=(key,)))):
        found[item.key].append(item.name)
        if len(found) > 1:
            raise ConfigError(f"key {key!r}", "is the beginning of several", "give more of it")
    return next(iter(found.values()), [])


def _show_all(out: Output, place: manage.Place, names: list[str], target: str) -> None:
    heads = {name: until_done(manage.read_head(place.store, name)) for name in sorted(names)}
    if not any(heads.values()):  # nothing is damaged, so there is no pointer to read on
        sys.stderr.write(f"s3cache: error: {printable(target)}: there is no such entry\n")
        raise Exit(1)
    for name, head in heads.items():
        if head is not None:
            _show(out, name, head, place.policy)


def _show(out: Output, name: str, head: Head, policy: Policy) -> None:
    from s3cache.artifact import description, inputs_and_outputs
    from s3cache.trust import unpack

    header, meta = head.header, head.header.meta
    graph = description(header)
    times = times if isinstance(times := meta.get("times_ns"), list) else []
    created = dt.datetime.fromtimestamp(header.created_ns // 10**9, dt.timezone.utc)
    said = ("signer", "audience", "issued_s", "expires_s")
    found: dict[str, Any] = {
        "name": name,
        "size": head.size,
        "digest": head.digest.hex(),
        **{each: getattr(header, each) for each in ("kind", "key", "variant", "schema")},
        "created": created.isoformat(),
        "producer": header.producer,
        "made_by": meta.get("made_by"),
        "times_s": [ns / 1e9 for ns in times if isinstance(ns, int)],
        "guards": meta.get("guards"),
        "relies_on": meta.get("relies_on"),
        "sections": [
            {"name": each.name, "size": each.raw_size, "stored": each.stored_size}
            for each in header.sections
        ],
        "signatures": [
            {name: getattr(each, name) for name in said} for each in unpack(head.signatures)
        ],
        "trust": _verdict(head, policy),
        "components": meta.get("components"),
        "graph": graph,
    }
    if out.json:
        out.record(found)
        return
    apart = ("components", "graph", "sections")
    rows = [(name, value) for name, value in found.items() if name not in apart]
    for each in header.sections:
        sizes = f"{size_text(each.raw_size)}, {size_text(each.stored_size)} stored"
        rows.append((f"section {each.name}", sizes))
    if isinstance(components := meta.get("components"), Mapping):
        rows += [(f"component {n}", value) for n, value in components.items()]
    if graph is not None:
        rows += inputs_and_outputs(graph)
    out.table((), [(n, _words(value) or "-") for n, value in rows])


def _words(value: object) -> str:
    """Return plain data in words, without what is false or empty."""
    if isinstance(value, Mapping):
        named = ((str(name).replace("_", " "), each) for name, each in value.items())
        texts = [
            name if each is True else f"{name} {_words(each)}"
            for name, each in named
            if each is not None and each is not False
        ]
    elif isinstance(value, list):
        texts = [_words(each) for each in value]
    else:
        return "" if value is None else str(value)
    return ", ".join(filter(None, texts))


def _verdict(head: Head, policy: Policy) -> str:
    try:
        signature = policy.check(head.digest, head.signatures)
    except UntrustedError as exc:
        return f"not used here ({exc.cause}): {exc.detail}"
    if signature is not None:
        return f"signed by {signature.signer}, who is trusted here"
    return "not asked for here" if policy.level == "off" else "used, though no known key signed it"
