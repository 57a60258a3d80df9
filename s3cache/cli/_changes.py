"""``s3cache pull``, ``push``, ``prefetch``, ``mirror``, ``rm``, ``clear`` and ``gc``."""

from __future__ import annotations

from contextlib import suppress

from typer import Argument, Option

from s3cache import manage
from s3cache.cli._options import (
    URL,
    Filters,
    Output,
    Where,
    finish,
    items_of,
    named_in,
    note_missing,
    size_text,
    until_done,
)
from s3cache.errors import AccessDeniedError, ConfigError
from s3cache.util.text import counted

_COPIED = "{done} copied ({size}), {present} were there, {failed} failed"
_NO_ENTRY = "v1/000/-"  # no entry has this name
_LOOK_EVERY_S = 0.1
_SHOWN = 20


def pull(filters: Filters, out: Output, url: str | None = URL) -> int:
    """Copy entries from the remote into this machine's local tier, and verify each.

    Entries that are there already stay, and an interrupted pull can be repeated. The local tier
    keeps its bounds: the least recently used entries make room.
    """
    selection = filters.selection()
    with manage.open_place(url) as remote, manage.open_place(url, in_tier=True) as local:
        return finish(out, *_copy(out, remote, local, selection), _COPIED)


def push(
    filters: Filters,
    out: Output,
    url: str | None = URL,
    timeout: float = Option(600.0, help="Seconds for pending uploads.", min=0),
) -> int:
    """Copy what this machine has of the remote's entries into the remote, and verify each.

    First it uploads what programs have saved and not uploaded, whatever is chosen.
    """
    from s3cache.cache import Cache

    selection = filters.selection()
    with manage.open_place(url, to_fill=True) as remote:
        # Uploads to a remote that is not there would be tried until the time is over.
        with suppress(AccessDeniedError):
            until_done(remote.store.get(_NO_ENTRY))
        with Cache.open(url) as cache:
            report = cache.flush(timeout)
        with manage.open_place(url, in_tier=True) as local:
            scan, result = _copy(out, local, remote, selection)
    if report.error is not None and report.remaining:
        result.fail(f"{report.remaining} that were not uploaded", report.error)
    return finish(out, scan, result, _COPIED)


def mirror(
    filters: Filters,
    out: Output,
    source: str = Argument(..., metavar="SOURCE", help="URL to copy from."),
    target: str = Argument(..., metavar="TARGET", help="URL to copy to."),
) -> int:
    """Copy entries from one remote into another, and verify each.

    Run again, it copies what is new and what differs. For that it reads all entries of the target.
    It replaces those that are damaged or not trusted, and those that differ and have no trusted
    signature. Nothing is removed from the target.
    """
    selection = filters.selection()
    with manage.open_place(source) as here, manage.open_place(target, to_fill=True) as there:
        return finish(out, *_copy(out, here, there, selection), _COPIED)


def _copy(
    out: Output, source: manage.Place, target: manage.Place, selection: manage.Selection
) -> tuple[manage.Scan, manage.BatchResult]:
    scan = manage.Scan(source, selection)
    with out.progress("copied") as advance:
        return scan, until_done(manage.copy(scan, target, advance))


def prefetch(
    out: Output,
    keys: list[str] | None = Argument(None, metavar="[KEY...]", help="Whole keys."),
    manifest: str | None = Option(None, metavar="FILE", help="Keys, one to a line; - for stdin."),
    url: str | None = URL,
) -> int:
    """Fetch the first entry of each key into this machine's local tier.

    A program that looks one up meanwhile joins the download.
    """
    from s3cache.cache import Cache
    from s3cache.entries import key_of

    named = [] if manifest is None else named_in(manifest)
    wanted = [*(keys or ()), *map(key_of, named)]
    if not wanted:
        raise ConfigError("s3cache prefetch", "has no keys", "give some, or --manifest FILE")
    with Cache.open(url, local=True) as cache:
        manage.url_of(cache.settings)
        under_way = cache.prefetch(wanted)
        with out.progress("fetched", len(under_way.names)) as advance:
            done = 0
            while not (report := under_way.wait(_LOOK_EVERY_S)).complete:
                now = report.present + report.found + report.absent + report.failed
                advance(now - done)
                done = now
    if out.json:
        out.record(report)
    else:
        out.line(
            f"{report.found} fetched ({size_text(report.size)}), {report.present} were here, "
            f"{report.absent} are not in the remote, {report.failed} failed"
        )
        if report.error is not None:
            out.line(f"the last error: {report.error}")
    return 1 if report.absent or report.failed else 0


def rm(
    where: Where,
    out: Output,
    keys: list[str] = Argument(..., metavar="KEY...", help="Whole keys."),
    dry_run: bool = Option(False, "--dry-run", help="Only list what would be removed."),
) -> int:
    """Remove all entries under some keys, from the remote or with --local from the local tier.

    Needs credentials that may delete. Machines that have an entry keep it in their local tiers.
    """
    from s3cache.entries import check_key

    selection = manage.Selection(manifest=frozenset(map(check_key, keys)))
    return _remove(out, where, selection, dry_run, "leave --dry-run out")


def clear(
    where: Where,
    out: Output,
    yes: bool = Option(False, "--yes", help="Remove them; else they are only counted."),
) -> int:
    """Remove all entries, from the remote or with --local from the local tier.

    Without --yes it only counts them. Needs credentials that may delete.
    """
    return _remove(out, where, manage.Selection(), not yes, "give --yes")


def gc(
    filters: Filters,
    where: Where,
    out: Output,
    delete: bool = Option(
        False, "--delete/--dry-run", help="Remove them; else they are only counted."
    ),
) -> int:
    """Remove entries that are old, large, of an old torch, never hit, unreadable or not trusted.

    Without --delete it only counts them. Needs at least one condition, and credentials that may
    delete. A lifecycle rule of the bucket does the same by age. Hits on other machines are recorded
    only there: with --never-hit give --older or --local, too.
    """
    if not filters.given:
        raise ConfigError("s3cache gc", "has no condition", "give one, such as --older 90d")
    if "never_hit" in filters.given and "older" not in filters.given and not where.local:
        cause = "knows of this machine's hits only"
        raise ConfigError("option --never-hit", cause, "give --older 30d, too")
    return _remove(out, where, filters.selection(), not delete, "give --delete")


def _remove(out: Output, where: Where, selection: manage.Selection, dry_run: bool, how: str) -> int:
    with where.open() as place, out.progress("removed") as advance:
        if selection.untrusted and place.policy.level == "off":
            cause = "asks for a key that is trusted"
            raise ConfigError("option --untrusted", cause, "set trusted_keys")
        scan = manage.Scan(place, selection)
        if dry_run:
            return _count(out, scan, how)
        keep = until_done(place.to_upload())
        try:
            result = until_done(manage.remove(scan, keep, advance))
        except AccessDeniedError as exc:
            raise AccessDeniedError(
                f"{exc}; to remove entries takes the operator's role, see infra/README.md"
            ) from exc
    kept = ", {kept} kept: not uploaded yet, or sound after all" if result.kept else ""
    summary = f"{counted(result.done, 'entry', 'entries')} removed ({{size}}){kept}"
    return finish(out, scan, result, summary, dry_run=False)


def _count(out: Output, scan: manage.Scan, how: str) -> int:
    count = size = 0
    for item in items_of(scan):
        count += 1
        size += item.size
        if out.json:
            out.record({"dry_run": True, "name": item.name, "size": item.size})
        elif count <= _SHOWN:
            out.line(item.name)
    if count > _SHOWN:
        out.note(f"and {count - _SHOWN} more")
    code = note_missing(out, scan)
    then = f"; {how} to do it" if count else ""
    out.note(f"{counted(count, 'entry', 'entries')} ({size_text(size)}) would be removed{then}")
    return code
