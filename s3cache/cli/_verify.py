"""``s3cache verify``: is every entry what it says it is?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from s3cache.cli._choosing import NOT_THERE, Where, chosen, entries_in, until_done
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output, size_text

if TYPE_CHECKING:
    from s3cache.catalog import Selection

__all__ = ["verify"]


@grouped(selection=chosen, where=Where, out=Output)
def verify(selection: Selection, where: Where, out: Output) -> None:
    """Read every entry whole, and check all digests; signatures too, where a key is trusted.

    Exit code 1 if anything is damaged, out of place or not trusted. To remove that: s3cache gc
    --unreadable --untrusted --delete.
    """
    from s3cache import catalog

    with where.open() as place, out.progress("verified") as advance:
        absent: list[str] = []
        batches = entries_in(place, selection, absent)
        tally = until_done(
            catalog.verify(place.store, batches, admit=place.policy.judge, advance=advance)
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
