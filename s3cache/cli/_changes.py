"""``s3cache pull``, ``push``, ``prefetch``, ``mirror``, ``rm``, ``clear`` and ``gc``."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from s3cache.cli._options import (
    NOT_THERE,
    Text,
    Texts,
    Url,
    Where,
    entries_in,
    finish,
    items_in,
    named_in,
    until_done,
)
from s3cache.cli._output import Output, size_text
from s3cache.errors import AccessDeniedError, ConfigError
from s3cache.util.words import counted

if TYPE_CHECKING:
    from s3cache.manage import BatchResult, Place, Selection
    from s3cache.store import Store

__all__ = ["clear", "gc", "mirror", "prefetch", "pull", "push", "rm"]

# -- copying

_NO_ENTRY = "v1/000/-"  # no entry has this name
_LOOK_EVERY_S = 0.1


def pull(selection: Selection, out: Output, url: Url = None) -> int:
    """Copy entries from the remote into this machine's local tier, and verify each.

    Entries that are there already stay, and an interrupted pull can be repeated. The local tier
    keeps its bounds: the least recently used entries make room.
    """
    from s3cache.manage import open_place

    with ExitStack() as stack:
        remote = stack.enter_context(open_place(url))
        local = stack.enter_context(open_place(url, in_tier=True))
        return finish(out, *_copy(out, remote, local, selection), _copied)


def push(
    selection: Selection,
    out: Output,
    url: Url = None,
    timeout: Annotated[float, Option(help="Seconds for pending uploads.", min=0)] = 600.0,
) -> int:
    """Copy what this machine has of the remote's entries into the remote, and verify each.

    First it uploads what programs have saved and not uploaded, whatever is chosen.
    """
    from s3cache.cache import Cache
    from s3cache.manage import open_place

    with ExitStack() as stack:
        remote = stack.enter_context(open_place(url, to_fill=True))
        # Uploads to a remote that is not there would be tried until the time is over.
        with suppress(AccessDeniedError):
            until_done(_reach(remote.store))
        with Cache.open(url) as cache:
            report = cache.flush(timeout)
        local = stack.enter_context(open_place(url, in_tier=True))
        tally, absent = _copy(out, local, remote, selection)
    if report.error is not None and report.remaining:
        tally.fail(f"{report.remaining} that were not uploaded", report.error)
    return finish(out, tally, absent, _copied)


async def _reach(store: Store) -> None:
    from s3cache.store import listing

    async with listing(store, _NO_ENTRY) as objects:
        async for _ in objects:
            return


def prefetch(
    out: Output,
    keys: Annotated[Texts, Argument(metavar="[KEY...]", help="Whole keys.")] = None,
    manifest: Annotated[
        Text, Option(metavar="FILE", help="Keys, one to a line; - for stdin.")
    ] = None,
    url: Url = None,
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
        if cache.settings.url is None:
            raise ConfigError("the cache", "has no URL", "give --url, or set S3CACHE_URL")
        under_way = cache.prefetch(wanted)
        with out.progress("fetched", len(under_way.names)) as advance:
            done = 0
            while not (report := under_way.wait(_LOOK_EVERY_S)).complete:
                now = report.present + report.found + report.absent + report.failed
                advance(now - done)
                done = now
    if out.json:
        names = ("total", "present", "found", "size", "absent", "failed")
        counts = {name: getattr(report, name) for name in names}
        out.record({**counts, "error": str(report.error) if report.error else None})
    else:
        out.line(
            f"{report.found} fetched ({size_text(report.size)}), {report.present} were here, "
            f"{report.absent} are not in the remote, {report.failed} failed"
        )
        if report.error is not None:
            out.line(f"the last error: {report.error}")
    return 1 if report.absent or report.failed else 0


def mirror(
    selection: Selection,
    out: Output,
    source: Annotated[str, Argument(metavar="SOURCE", help="URL to copy from.")],
    target: Annotated[str, Argument(metavar="TARGET", help="URL to copy to.")],
) -> int:
    """Copy entries from one remote into another, and verify each.

    Run again, it copies what is new and what differs. For that it reads all entries of the target.
    It replaces those that are damaged or not trusted, and those that differ and have no trusted
    signature. Nothing is removed from the target.
    """
    from s3cache.manage import open_place

    with ExitStack() as stack:
        here = stack.enter_context(open_place(source))
        there = stack.enter_context(open_place(target, to_fill=True))
        return finish(out, *_copy(out, here, there, selection), _copied)


def _copy(
    out: Output, source: Place, target: Place, selection: Selection
) -> tuple[BatchResult, list[str]]:
    from s3cache import manage

    absent: list[str] = []
    with out.progress("copied") as advance:
        batches = entries_in(source, selection, absent)
        work = manage.copy(
            source.store, target.store, batches, admit=source.policy.check, advance=advance
        )
        return until_done(work), absent


def _copied(tally: BatchResult) -> str:
    return (
        f"{tally.done} copied ({size_text(tally.size)}), {tally.present} were there, "
        f"{tally.failed} failed"
    )


# -- removing

_SHOWN = 20


def rm(
    where: Where,
    out: Output,
    keys: Annotated[list[str], Argument(metavar="KEY...", help="Whole keys.")],
    dry_run: Annotated[bool, Option("--dry-run", help="Only list what would be removed.")] = False,
) -> int:
    """Remove all entries under some keys, from the remote or with --local from the local tier.

    Needs credentials that may delete. Machines that have an entry keep it in their local tiers.
    """
    from s3cache.entries import check_key
    from s3cache.manage import Selection

    selection = Selection(named=frozenset(map(check_key, keys)))
    return _remove(out, where, selection, dry_run, "leave --dry-run out")


def clear(
    where: Where,
    out: Output,
    yes: Annotated[bool, Option("--yes", help="Remove them; else they are only counted.")] = False,
) -> int:
    """Remove all entries, from the remote or with --local from the local tier.

    Without --yes it only counts them. Needs credentials that may delete.
    """
    from s3cache.manage import Selection

    return _remove(out, where, Selection(), not yes, "give --yes")


def gc(
    selection: Selection,
    where: Where,
    out: Output,
    delete: Annotated[
        bool, Option("--delete/--dry-run", help="Remove them; else they are only counted.")
    ] = False,
) -> int:
    """Remove entries that are old, large, of an old torch, never hit, unreadable or not trusted.

    Without --delete it only counts them. Needs at least one condition, and credentials that may
    delete. A lifecycle rule of the bucket does the same by age. Hits on other machines are recorded
    only there: with --never-hit give --older or --local, too.
    """
    if selection.is_everything:
        raise ConfigError("s3cache gc", "has no condition", "give one, such as --older 90d")
    if selection.but_keys is not None and selection.older_s is None and not where.local:
        cause = "knows of this machine's hits only"
        raise ConfigError("option --never-hit", cause, "give --older 30d, too")
    return _remove(out, where, selection, not delete, "give --delete")


def _remove(out: Output, where: Where, selection: Selection, dry_run: bool, how: str) -> int:
    from s3cache import manage

    absent: list[str] = []
    with where.open() as place, out.progress("removed") as advance:
        if selection.untrusted and place.policy.level == "off":
            cause = "asks for a key that is trusted"
            raise ConfigError("option --untrusted", cause, "set trusted_keys")
        if dry_run:
            return _count(out, place, selection, absent, how)
        keep = until_done(place.to_upload())
        batches = entries_in(place, selection, absent)
        try:
            tally = until_done(
                manage.remove(
                    place.store, batches, keep=keep, admit=place.policy.check, advance=advance
                )
            )
        except AccessDeniedError as exc:
            raise AccessDeniedError(
                f"{exc}; to remove entries takes the operator's role, see infra/README.md"
            ) from exc
    kept = f", {tally.kept} kept: not uploaded yet, or sound after all" if tally.kept else ""
    summary = f"{counted(tally.done, 'entry', 'entries')} removed ({size_text(tally.size)}){kept}"
    return finish(out, tally, absent, lambda _: summary, dry_run=False)


def _count(out: Output, place: Place, selection: Selection, absent: list[str], how: str) -> int:
    count = size = 0
    for item in items_in(place, selection, absent):
        count += 1
        size += item.size
        if out.json:
            out.record({"dry_run": True, "name": item.name, "size": item.size})
        elif count <= _SHOWN:
            out.line(item.name)
    if count > _SHOWN:
        out.note(f"and {count - _SHOWN} more")
    for name in absent:
        out.note(f"{name}: {NOT_THERE}")
    then = f"; {how} to do it" if count else ""
    out.note(f"{counted(count, 'entry', 'entries')} ({size_text(size)}) would be removed{then}")
    return 1 if absent else 0
