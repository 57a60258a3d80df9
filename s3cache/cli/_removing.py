"""``s3cache rm``, ``clear`` and ``gc``: entries that are no longer wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from s3cache._words import counted
from s3cache.cli._choosing import (
    NOT_THERE,
    Where,
    chosen,
    entries_in,
    until_done,
    whole_batches,
)
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output, size_text
from s3cache.errors import AccessDeniedError, ConfigError

if TYPE_CHECKING:
    from s3cache.catalog import Place, Selection

__all__ = ["clear", "gc", "rm"]

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
    from s3cache.catalog import Selection
    from s3cache.entries import check_key

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
    from s3cache.catalog import Selection

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
    from s3cache import catalog

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
                catalog.remove(
                    place.store,
                    entries_in(place, selection, absent),
                    keep=keep,
                    admit=place.policy.judge,
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
