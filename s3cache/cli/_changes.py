"""``s3cache pull``, ``push``, ``prefetch``, ``mirror``, ``rm``, ``clear`` and ``gc``."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from s3cache._words import counted
from s3cache.cli._options import (
    NOT_THERE,
    Url,
    Where,
    chosen,
    entries_in,
    grouped,
    named_in,
    until_done,
    whole_batches,
)
from s3cache.cli._output import Output, size_text
from s3cache.errors import AccessDeniedError, ConfigError

if TYPE_CHECKING:
    from s3cache.manage import Place, Selection, Tally

__all__ = ["clear", "gc", "mirror", "prefetch", "pull", "push", "rm"]

# ruff: noqa: UP045 - see _options.py

# -- copying


#: No entry has this name.
_NOTHING = "v1/000/-"
_LOOK_EVERY_S = 0.1


@grouped(selection=chosen, out=Output)
def pull(selection: Selection, out: Output, url: Url = None) -> None:
    """Copy entries from the remote into this machine's local tier, each verified.

    What is there already stays; what was interrupted goes on where it was. The local tier keeps
    its bounds: what was used longest ago makes room.
    """
    from s3cache.manage import open_place

    with ExitStack() as stack:
        remote = stack.enter_context(open_place(url))
        local = stack.enter_context(open_place(url, in_tier=True))
        tally = _copy(out, remote, local, selection)
    _show_copied(out, tally)


@grouped(selection=chosen, out=Output)
def push(
    selection: Selection,
    out: Output,
    url: Url = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds for what was saved and is not uploaded.", min=0)
    ] = 600.0,
) -> None:
    """Copy what this machine has of the remote's entries into the remote, each verified.

    First comes what programs have saved and not uploaded, whatever is chosen.
    """
    from s3cache.cache import Cache
    from s3cache.manage import open_place

    with ExitStack() as stack:
        remote = stack.enter_context(open_place(url, to_fill=True))
        # Uploads to what is not there would be tried until the time is over.
        with suppress(AccessDeniedError):
            until_done(_reach(remote.store))
        with Cache.open(url) as cache:
            report = cache.flush(timeout)
        local = stack.enter_context(open_place(url, in_tier=True))
        tally = _copy(out, local, remote, selection)
    if report.error is not None and report.remaining:
        tally.fail(f"{report.remaining} that were not uploaded", report.error)
    _show_copied(out, tally)


async def _reach(store: Any) -> None:
    from s3cache.store import listing

    async with listing(store, _NOTHING) as objects:
        async for _ in objects:
            return


@grouped(out=Output)
def prefetch(
    out: Output,
    keys: Annotated[
        Optional[list[str]], typer.Argument(metavar="[KEY...]", help="Whole keys.")
    ] = None,
    manifest: Annotated[
        Optional[str], typer.Option(metavar="FILE", help="Keys, one to a line; - for stdin.")
    ] = None,
    url: Url = None,
) -> None:
    """Fetch the first entry of each key into this machine's local tier.

    A lookup of a program that starts meanwhile joins what is under way.
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
        out.record({**_fields(report), "error": str(report.error) if report.error else None})
    else:
        out.line(
            f"{report.found} fetched ({size_text(report.size)}), {report.present} were here, "
            f"{report.absent} are not in the remote, {report.failed} failed"
        )
        if report.error is not None:
            out.line(f"the last error: {report.error}")
    raise typer.Exit(1 if report.absent or report.failed else 0)


@grouped(selection=chosen, out=Output)
def mirror(
    selection: Selection,
    out: Output,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="URL to copy from.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="URL to copy to.")],
) -> None:
    """Copy entries from one remote into another, each verified.

    Done again, it copies what is new, and what the target has otherwise than the source: it reads
    all that is there, and replaces what is damaged, what is not trusted and, where no trusted key
    has signed it, what differs. Nothing is removed from the target.
    """
    from s3cache.manage import open_place

    with ExitStack() as stack:
        here = stack.enter_context(open_place(source))
        there = stack.enter_context(open_place(target, to_fill=True))
        tally = _copy(out, here, there, selection)
    _show_copied(out, tally)


def _copy(out: Output, source: Place, target: Place, selection: Selection) -> Tally:
    from s3cache import manage

    with out.progress("copied") as advance:
        absent: list[str] = []
        tally = until_done(
            manage.copy(
                source.store,
                target.store,
                entries_in(source, selection, absent),
                admit=source.policy.check,
                advance=advance,
            )
        )
    for name in absent:
        tally.fail(name, NOT_THERE)
    return tally


def _show_copied(out: Output, tally: Tally) -> None:
    if out.json:
        out.record(vars(tally))
    else:
        for name, why in tally.failures:
            out.line(f"{name}: {why}")
        out.line(
            f"{tally.done} copied ({size_text(tally.size)}), {tally.present} were there, "
            f"{tally.failed} failed"
        )
    raise typer.Exit(1 if tally.failed else 0)


def _fields(report: Any) -> dict[str, Any]:
    names = ("total", "present", "found", "size", "absent", "failed")
    return {name: getattr(report, name) for name in names}


# -- removing


_SHOWN = 20


@grouped(where=Where, out=Output)
def rm(
    where: Where,
    out: Output,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Whole keys.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove all entries under some keys, from the remote or with --local from the local tier.

    Needs credentials that may delete. Machines that have an entry keep it in their local tiers.
    """
    from s3cache.entries import check_key
    from s3cache.manage import Selection

    _remove(out, where, Selection(named=frozenset(map(check_key, keys))), dry_run=dry_run)


@grouped(where=Where, out=Output)
def clear(
    where: Where,
    out: Output,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; else it is only counted.")] = False,
) -> None:
    """Remove all entries, from the remote or with --local from the local tier.

    Without --yes it only says what would go. Needs credentials that may delete.
    """
    from s3cache.manage import Selection

    _remove(out, where, Selection(), dry_run=not yes, how="give --yes")


@grouped(selection=chosen, where=Where, out=Output)
def gc(
    selection: Selection,
    where: Where,
    out: Output,
    delete: Annotated[
        bool, typer.Option("--delete/--dry-run", help="Do it; else it is only counted.")
    ] = False,
) -> None:
    """Remove entries that are old, large, of an old torch, never hit, unreadable or not trusted.

    Without --delete it only says what would go; at least one condition has to be given. Needs
    credentials that may delete. A lifecycle rule of the bucket does the same by age. What others
    hit is on record on their machines only: with --never-hit give --older or --local, too.
    """
    if selection.is_everything:
        raise ConfigError("s3cache gc", "has no condition", "give one, such as --older 90d")
    if selection.but_keys is not None and selection.older_s is None and not where.local:
        raise ConfigError(
            "option --never-hit", "knows of this machine's hits only", "give --older 30d, too"
        )
    _remove(out, where, selection, dry_run=not delete, how="give --delete")


def _remove(
    out: Output,
    where: Where,
    selection: Selection,
    *,
    dry_run: bool,
    how: str = "leave --dry-run out",
) -> None:
    from s3cache import manage

    with where.open() as place, out.progress("removed") as advance:
        if selection.untrusted and place.policy.level == "off":
            raise ConfigError(
                "option --untrusted", "asks for a key that is trusted", "set trusted_keys"
            )
        absent: list[str] = []
        if dry_run:
            _count(out, place, selection, absent, how)
            raise typer.Exit(1 if absent else 0)
        keep = until_done(place.to_upload())
        try:
            tally = until_done(
                manage.remove(
                    place.store,
                    entries_in(place, selection, absent),
                    keep=keep,
                    admit=place.policy.check,
                    advance=advance,
                )
            )
        except AccessDeniedError as exc:
            raise AccessDeniedError(
                f"{exc}; to remove entries takes the operator's role, see infra/README.md"
            ) from exc
    for name in absent:
        tally.fail(name, NOT_THERE)
    if out.json:
        out.record({"dry_run": False, **vars(tally)})
    else:
        for name, why in tally.failures:
            out.line(f"{name}: {why}")
        kept = f", {tally.kept} kept: not uploaded yet, or sound after all" if tally.kept else ""
        done = counted(tally.done, "entry", "entries")
        out.line(f"{done} removed ({size_text(tally.size)}){kept}")
    raise typer.Exit(1 if tally.failed else 0)


def _count(out: Output, place: Place, selection: Selection, absent: list[str], how: str) -> None:
    count = size = 0
    for batch in whole_batches(entries_in(place, selection, absent)):
        for item in batch:
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
    found = counted(count, "entry", "entries")
    then = f"; {how} to do it" if count else ""
    out.note(f"{found} ({size_text(size)}) would be removed{then}")
