"""``s3cache pull``, ``push``, ``prefetch`` and ``mirror``: entries from one place to another."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from s3cache._words import counted
from s3cache.cli._choosing import NOT_THERE, Url, chosen, entries_in, named_in, opened, until_done
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output, size_text
from s3cache.errors import AccessDeniedError, ConfigError

if TYPE_CHECKING:
    from s3cache.catalog import Place, Selection, Tally

__all__ = ["mirror", "prefetch", "pull", "push"]

# ruff: noqa: UP045 - see _choosing.py

#: No entry has this name.
_NOTHING = "v1/000/-"
_LOOK_EVERY_S = 0.1


@grouped(selection=chosen, out=Output)
def pull(selection: Selection, out: Output, url: Url = None) -> None:
    """Copy entries from the remote into this machine's local tier, each verified.

    What is there already stays; what was interrupted goes on where it was. The local tier keeps
    its bounds: what was used longest ago makes room.
    """
    from s3cache.catalog import open_place

    with ExitStack() as stack:
        remote = stack.enter_context(opened(open_place(url)))
        local = stack.enter_context(opened(open_place(url, in_tier=True)))
        tally = _copied(out, remote, local, selection)
    _tell(out, tally)


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

    First comes what programs have saved and not uploaded, whatever is chosen. With S3CACHE_HINTS=1
    hints are left beside what is copied.
    """
    from s3cache.cache import Cache
    from s3cache.catalog import open_place

    with ExitStack() as stack:
        remote = stack.enter_context(opened(open_place(url, to_fill=True)))
        # Uploads to what is not there would be tried until the time is over.
        with suppress(AccessDeniedError):
            until_done(_reach(remote.store))
        with Cache.open(url) as cache:
            report = cache.flush(timeout)
        local = stack.enter_context(opened(open_place(url, in_tier=True)))
        tally = _copied(out, local, remote, selection)
    if report.error is not None and report.remaining:
        tally.fail(f"{report.remaining} that were not uploaded", report.error)
    _tell(out, tally)


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
    has signed it, what differs. Nothing is removed from the target. Hints beside entries go with
    them, and are written again where S3CACHE_HINTS=1.
    """
    from s3cache.catalog import open_place

    with ExitStack() as stack:
        here = stack.enter_context(opened(open_place(source)))
        there = stack.enter_context(opened(open_place(target, to_fill=True)))
        tally = _copied(out, here, there, selection)
    _tell(out, tally)


def _copied(out: Output, source: Place, target: Place, selection: Selection) -> Tally:
    from s3cache import catalog

    with out.progress("copied") as advance:
        absent: list[str] = []
        tally = until_done(
            catalog.copy(
                source.store,
                target.store,
                entries_in(source, selection, absent),
                admit=source.policy.judge,
                write_hints=target.settings.hints,
                few=selection.named is not None,
                advance=advance,
            )
        )
    for name in absent:
        tally.fail(name, NOT_THERE)
    return tally


def _tell(out: Output, tally: Tally) -> None:
    if out.json:
        out.record(vars(tally))
    else:
        for name, why in tally.failures:
            out.line(f"{name}: {why}")
        hints = f", {counted(tally.hints, 'hint')} beside them" if tally.hints else ""
        out.line(
            f"{tally.done} copied ({size_text(tally.size)}), {tally.present} were there, "
            f"{tally.failed} failed{hints}"
        )
    raise typer.Exit(1 if tally.failed else 0)


def _fields(report: Any) -> dict[str, Any]:
    names = ("total", "present", "found", "size", "absent", "failed")
    return {name: getattr(report, name) for name in names}
