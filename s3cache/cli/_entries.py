"""Commands on entries: list, sum up, verify, inspect, copy and remove them."""

from __future__ import annotations

import datetime as dt
import heapq
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from typer import Argument, Option

from s3cache import manage
from s3cache.cli._options import (
    NOT_THERE,
    URL,
    Filters,
    Output,
    Where,
    finish,
    items_of,
    json_text,
    note_missing,
    option,
    size_bytes,
    size_text,
    until_done,
    work_on,
)
from s3cache.errors import AccessDeniedError, ConfigError, UntrustedError
from s3cache.settings import Settings
from s3cache.util.text import counted

if TYPE_CHECKING:
    from s3cache.frame import Head
    from s3cache.trust import Policy

_Order: TypeAlias = Literal["age", "key", "kind", "size", "torch"]
_Group: TypeAlias = Literal["age", "device", "kind", "signer", "size", "tag", "torch"]

# -- listing

# Sort keys; the smallest comes first.
_ORDERS: dict[_Order, Callable[[manage.Item], Any]] = {
    "age": lambda item: -item.modified,
    "key": lambda item: (item.key, item.name),
    "kind": lambda item: (item.values("kind"), item.key),
    "size": lambda item: -item.size,
    "torch": lambda item: (item.values("torch"), item.key),
}
# How many entries sorting keeps in memory, unless a limit is given.
_SORTED_AT_MOST = 1000
_DAY_S = 86400
# Groups by age in days, or size in MiB: an entry is in the first group with a larger bound.
_AGES = {"below 1 day": 1, "below 7 days": 7, "below 30 days": 30, "30 days or more": math.inf}
_SIZES = {"below 1 MiB": 1, "below 16 MiB": 16, "below 256 MiB": 256, "256 MiB or more": math.inf}
# The columns of `--long`, and their widths.
_LONG = {"kind": 6, "torch": 14, "device": 5, "tag": 8, "signer": 12}


def ls(
    filters: Filters,
    where: Where,
    out: Output,
    long: bool = Option(False, "--long", "-l", help="Also what headers say: one request each."),
    sort: _Order | None = Option(None, help="Put the newest, largest or first on top."),
    reverse: bool = Option(False, "--reverse", "-r", help="Sort the other way, else by age."),
    limit: int | None = Option(None, help="At most so many entries.", min=1),
) -> int:
    """List entries: size, time since the last change, key and variant.

    --long adds kind, torch, device, tag and signers. Entries are printed as they are found, so the
    bucket may have any size. With --sort, at most a thousand are shown without --limit.
    """
    long = long or sort in ("kind", "torch") or filters.selection.needs_headers
    names = "key", "name", "size", "modified", *(("about", "problem") if long else ())
    shown = 0
    with where.open() as place:
        scan = manage.Scan(place, filters.selection, headers=long)
        items: Iterable[manage.Item] = items_of(scan)
        if sort or reverse:
            pick = heapq.nlargest if reverse else heapq.nsmallest
            items = pick(limit or _SORTED_AT_MOST, items, key=_ORDERS[sort or "age"])
        for item in itertools.islice(items, limit):
            shown += 1
            if out.json:
                out.record({name: getattr(item, name) for name in names})
            else:
                out.line(_item_text(item, long))
    out.note(counted(shown, "entry", "entries") if shown else "no entries")
    return note_missing(out, scan)


def _item_text(item: manage.Item, long: bool) -> str:
    units = (("d", _DAY_S), ("h", 3600), ("min", 60), ("s", 1))
    unit, length = next((row for row in units if item.age_s >= row[1]), units[-1])
    age = f"{max(item.age_s, 0) / length:.0f} {unit}"
    cells = [f"{size_text(item.size):>10}", f"{age:>6}"]
    for field, width in _LONG.items() if long else ():
        text = "?" if item.about is None else ",".join(item.values(field)) or "-"
        cells.append(f"{text:{width}}")
    cells += [item.key, item.name.rpartition(".")[2]]
    if item.problem is not None:
        cells.append(f"({item.problem})")
    return "  ".join(cells)


def stats(
    filters: Filters,
    where: Where,
    out: Output,
    by: _Group | None = Option(
        None, help="Sum up by group; all but age and size read each entry's header."
    ),
) -> int:
    """Count the entries in the remote and in the local tier, and pending uploads.

    With --local, count the local tier only. With --by or a condition, sum up the number and the
    size of entries in the remote (with --local, in the local tier) by group, else by age, largest
    sum first. Processes that compile count their own hits and misses, and print them at the end
    with S3CACHE_SUMMARY=1.
    """
    if by is None and filters.selection == manage.Selection():
        _show_totals(where, out)
        return 0
    by = by or "age"
    counts, sizes = Counter[str](), Counter[str]()
    with where.open() as place, out.progress("entries") as advance:
        scan = manage.Scan(place, filters.selection, headers=by not in ("age", "size"))
        for item in items_of(scan):
            name = _group_of(item, by)
            counts[name] += 1
            sizes[name] += item.size
            advance()
    rows = sorted(((n, counts[n], sizes[n]) for n in counts), key=lambda row: (-row[2], row[0]))
    count, size = counts.total(), sizes.total()
    code = note_missing(out, scan)
    if out.json:
        groups = [{by: name, "entries": n, "bytes": total} for name, n, total in rows]
        sums = {"by": by, "groups": groups, "entries": count, "bytes": size}
        out.record({**sums, "absent": scan.absent})
    else:
        rows.append(("all", count, size))
        out.table([by, ">entries", ">size"], [(name, n, size_text(sum_)) for name, n, sum_ in rows])
    return code


def _group_of(item: manage.Item, by: _Group) -> str:
    if by in ("age", "size"):
        bounds, value = (_AGES, item.age_s / _DAY_S) if by == "age" else (_SIZES, item.size / 2**20)
        return next(name for name, bound in bounds.items() if value < bound)
    return "(not readable)" if item.about is None else " ".join(item.values(by)) or "(none)"


def _show_totals(where: Where, out: Output) -> None:
    totals: dict[str, Any] = {}
    settings, _ = Settings.load(where.url)
    if settings.local:
        with manage.open_place(where.url, in_tier=True, of_all=True) as place:
            totals["local"] = {
                **_totals(place),
                "directory": settings.local_dir,
                "max_bytes": settings.local_max_bytes,
                "max_files": settings.local_max_files,
                "to_upload": len(until_done(place.to_upload())),
            }
    if settings.url is not None and not where.local:
        with manage.open_place(where.url) as place:
            totals["remote"] = {**_totals(place), "url": place.store.url}
    if out.json:
        out.record(totals)
        return
    for tier, counts in totals.items():
        out.line(f"{tier}:")
        texts = {n: size_text(value) if "bytes" in n else value for n, value in counts.items()}
        out.table((), [(f"  {name}", text) for name, text in texts.items()])


def _totals(place: manage.EntryLocation) -> dict[str, int]:
    entries = size = 0
    # Every key in a remote has one first entry. A local tier may lack it, but is bounded.
    first, local_keys = 0, set[str]()
    for item in items_of(manage.Scan(place)):
        entries += 1
        size += item.size
        first += item.name.endswith(".0")
        if place.is_local:
            local_keys.add(item.key)
    return {"entries": entries, "keys": len(local_keys) or first, "bytes": size}


def verify(filters: Filters, where: Where, out: Output) -> int:
    """Read every entry completely and check all digests; with trusted keys, also signatures.

    Exits with 1 if an entry is damaged, misplaced or not trusted. To remove such entries:
    s3cache rm --unreadable --untrusted --delete.
    """
    with where.open() as place:
        scan = manage.Scan(place, filters.selection)
        result = work_on(out, "verified", scan, manage.verify)
    checked = "" if place.policy.level == "off" else ", signatures too"
    summary = f"{{done}} sound{checked} ({{size}}), {{failed}} not"
    return finish(out, scan, result, summary, trust=place.policy.level)


# The URL of an object: the URL of its store, its name, and options.
_OBJECT = re.compile(r"(\w+://[^?]*?)/(v1/[0-9a-f]/[^/?]+)(\?.*)?")


def inspect(
    where: Where,
    out: Output,
    target: str = Argument(
        ...,
        metavar="KEY|FILE|URL",
        help="A key or the beginning of one, a file, or the URL of an object.",
    ),
) -> int:
    """Show the content of an entry: key, guards, kernels, times, signatures, its graph.

    Nothing is unpickled, and torch is not needed. Only the header is verified; s3cache verify
    checks the whole entry.
    """
    from s3cache import frame

    if "://" not in target and (os.sep in target or os.path.isfile(target)):
        if not (os.path.isfile(target) and os.access(target, os.R_OK)):  # a pipe would block
            problem = "cannot be read, or is not a regular file"
            raise ConfigError(f"file {target}", problem, "give another file")
        with open(target, "rb") as file:
            header = frame.decode_head(file.read(2 * frame.MAX_HEADER_BYTES))
        _show(out, target, header, Settings.load()[0].trust_policy())
        return 0
    part = _OBJECT.fullmatch(target)
    if part is None and "://" in target:
        fix = "give SCHEME://.../v1/3/KEY.0, or a key and --url"
        raise ConfigError("the URL", "is not the URL of an entry", fix)
    code = 1
    with manage.open_place(part[1] + (part[3] or "")) if part else where.open() as place:
        for name in sorted([part[2]] if part else _names_of(place, target)):
            if (head := until_done(manage.read_head(place.store, name))) is not None:
                _show(out, name, head, place.policy)
                code = 0
    if code:
        out.note(f"{target}: {NOT_THERE}")
    return code


def _names_of(place: manage.EntryLocation, key: str) -> list[str]:
    """Return the names of all entries under ``key``, or under the only key with this prefix."""
    whole = manage.Selection(manifest=frozenset({key}))  # one request
    if names := [item.name for item in items_of(manage.Scan(place, whole))]:
        return names
    items = [*items_of(manage.Scan(place, manage.Selection(key=(key,))))]
    if len({item.key for item in items}) > 1:
        raise ConfigError(f"key {key!r}", "is the beginning of several", "give more digits")
    return [item.name for item in items]


def _show(out: Output, name: str, head: Head, policy: Policy) -> None:
    from s3cache.artifact import description, inputs_and_outputs
    from s3cache.trust import unpack

    header, meta = head.header, head.header.meta
    times = times if isinstance(times := meta.get("times_ns"), list) else []
    created = dt.datetime.fromtimestamp(header.created_ns // 10**9, dt.timezone.utc)
    of_signature = ("signer", "audience", "issued_s", "expires_s")
    content: dict[str, Any] = {
        "name": name,
        "size": head.size,
        "digest": head.digest.hex(),
        **{field: getattr(header, field) for field in ("kind", "key", "variant", "schema")},
        "created": created.isoformat(),
        "producer": header.producer,
        "times_s": [ns / 1e9 for ns in times if isinstance(ns, int)],
        **{field: meta.get(field) for field in ("made_by", "guards", "relies_on")},
        "left": left if isinstance(left := meta.get("left"), list) else [],
        "sections": [
            {"name": section.name, "size": section.raw_size, "stored": section.stored_size}
            for section in header.sections
        ],
        "signatures": [
            {**{n: getattr(signed, n) for n in of_signature}, "algorithm": signed.algorithm.name}
            for signed in unpack(head.signatures)
        ],
        "trust": _verdict(head, policy),
        "components": meta.get("components"),
        "graph": description(header),
    }
    if out.json:
        out.record(content)
        return
    rows: list[tuple[str, object]] = []
    for title, value in content.items():
        if title == "components" and isinstance(value, Mapping):
            rows += ((f"component {part}", pair) for part, pair in value.items())
        elif title == "graph":
            rows += inputs_and_outputs(value) if value else ()
        elif title == "left":
            rows += (("left to measure", ", ".join(map(str, kernel))) for kernel in value)
        elif title == "sections":
            rows += ((f"section {part['name']}", size_text(part["size"])) for part in value)
        else:
            rows.append((title, value))
    out.table((), [(n, (v or "-") if isinstance(v, str) else json_text(v)) for n, v in rows])


def _verdict(head: Head, policy: Policy) -> str:
    try:
        signature = policy.check(head.digest, head.signatures)
    except UntrustedError as exc:
        return f"not used here ({exc.cause}): {exc.detail}"
    if signature is not None:
        return f"signed by {signature.signer}, which is trusted here"
    return "not checked here" if policy.level == "off" else "used without a trusted signature"


# -- copying

KEYS: list[str] | None = Argument(None, metavar="[KEY...]", help="Whole keys.", show_default=False)
_COPIED = "{done} copied ({size}), {present} were there, {failed} failed"
_NO_ENTRY = "v1/0/-"  # no entry has this name


def pull(
    filters: Filters,
    out: Output,
    keys: list[str] | None = KEYS,
    url: str | None = URL,
) -> int:
    """Copy entries from the remote into this machine's local tier, and verify them.

    Existing entries stay, and an interrupted pull can be repeated. The local tier keeps its bounds:
    the least recently used entries are evicted.
    """
    chosen = _chosen(filters, keys)
    with manage.open_place(url) as remote, manage.open_place(url, in_tier=True) as local:
        return finish(out, *_copy(out, remote, local, chosen), _COPIED)


def push(
    filters: Filters,
    out: Output,
    url: str | None = URL,
    timeout: float = Option(600.0, help="Seconds for pending uploads.", min=0),
) -> int:
    """Copy entries from this machine's local tier into the remote, and verify them.

    First it finishes all pending uploads of programs, also of entries that are not selected.
    """
    from s3cache.cache import Cache

    with manage.open_place(url, to_fill=True) as remote:
        # Uploads to a missing remote would be retried until the timeout.
        with suppress(AccessDeniedError):
            until_done(remote.store.get(_NO_ENTRY))
        with Cache.open(url) as cache:
            report = cache.flush(timeout)
        with manage.open_place(url, in_tier=True) as local:
            scan, result = _copy(out, local, remote, filters.selection)
            for other, count in until_done(local.left_for_others()).items():
                out.note(f"uploads that wait for another URL, {other}: {count}")
    if report.error is not None and report.remaining:
        result.fail(f"{report.remaining} pending uploads", report.error)
    return finish(out, scan, result, _COPIED)


def mirror(
    filters: Filters,
    out: Output,
    source: str = Argument(..., metavar="SOURCE", help="URL to copy from."),
    target: str = Argument(..., metavar="TARGET", help="URL to copy to."),
) -> int:
    """Copy entries from one remote into another, and verify them.

    A second run copies new entries, and entries with another digest. It replaces entries in the
    target that are not trusted, and those that differ and have no trusted signature. Nothing is
    removed from the target.
    """
    with manage.open_place(source) as here, manage.open_place(target, to_fill=True) as there:
        return finish(out, *_copy(out, here, there, filters.selection), _COPIED)


def _chosen(filters: Filters, keys: list[str] | None) -> manage.Selection:
    """Return the conditions, with ``keys`` beside those of a manifest."""
    from s3cache.entries import check_key

    chosen = filters.selection
    named = frozenset(map(check_key, keys or ()))
    return replace(chosen, manifest=named | (chosen.manifest or frozenset())) if named else chosen


def _copy(
    out: Output,
    source: manage.EntryLocation,
    target: manage.EntryLocation,
    selection: manage.Selection,
) -> tuple[manage.Scan, manage.BatchResult]:
    scan = manage.Scan(source, selection)
    return scan, work_on(out, "copied", scan, partial(manage.copy, target=target))


# -- removing


def rm(
    filters: Filters,
    where: Where,
    out: Output,
    keys: list[str] | None = KEYS,
    everything: bool = Option(False, "--all", help="All entries."),
    keep: str | None = option("SIZE", "Keep the latest of them, up to this size in all: 100GB."),
    delete: bool | None = Option(
        None, "--delete/--dry-run", help="Remove them; or only list and count them."
    ),
) -> int:
    """Remove entries, from the remote or with --local from the local tier.

    Give keys: all entries under them are removed, unless --dry-run is given. Or give conditions,
    --keep or --all: the entries that meet all conditions are only counted, unless --delete is
    given. Needs credentials that may delete. Other machines keep copies in their local tiers.
    --keep bounds the size of a bucket, or of the local tier: the entries with the oldest change (in
    the local tier: use) are removed first. A lifecycle rule of the bucket removes by age. Only this
    machine's hits are known: use --never-hit with --older or --local.
    """
    chosen = _chosen(filters, keys)
    is_by_key = filters.selection == manage.Selection() and keep is None and not everything
    if is_by_key and not keys:
        fix = "give some, or one such as --older 90d, or --all"
        raise ConfigError("s3cache rm", "has no key and no condition", fix)
    if chosen.never_hit is not None and chosen.older < 0 and not where.local:
        cause = "only knows this machine's hits"
        raise ConfigError("option --never-hit", cause, "give --older 30d, too")
    if keep is not None:
        with where.open() as place:
            scan = manage.Scan(place, chosen)
            age_s = until_done(manage.age_beyond(scan, size_bytes("--keep", keep)))
        chosen = replace(chosen, older=max(chosen.older, age_s))
    with where.open() as place:
        if chosen.untrusted and place.policy.level == "off":
            cause = "needs a trusted key"
            raise ConfigError("option --untrusted", cause, "set trusted_keys")
        scan = manage.Scan(place, chosen)
        if not (is_by_key if delete is None else delete):
            return _count(out, scan, "omit --dry-run" if is_by_key else "give --delete")
        unsaved = until_done(place.to_upload())
        try:
            result = work_on(out, "removed", scan, partial(manage.remove, keep=unsaved))
        except AccessDeniedError as exc:
            hint = "removing entries needs the operator's role, see infra/README.md"
            raise AccessDeniedError(f"{exc}; {hint}") from exc
    kept = ", {kept} kept: not uploaded yet, or found to be sound" if result.kept else ""
    summary = f"{counted(result.done, 'entry', 'entries')} removed ({{size}}){kept}"
    return finish(out, scan, result, summary, dry_run=False)


def _count(out: Output, scan: manage.Scan, how: str) -> int:
    count = size = 0
    for item in items_of(scan):
        count += 1
        size += item.size
        if out.json:
            out.record({"dry_run": True, "name": item.name, "size": item.size})
        else:
            out.line(item.name)
    code = note_missing(out, scan)
    then = f"; {how} to do it" if count else ""
    out.note(f"{counted(count, 'entry', 'entries')} ({size_text(size)}) would be removed{then}")
    return code
