"""``s3cache stats``: what there is, here and in the remote, in a few numbers."""

from __future__ import annotations

from typing import Any

from s3cache._words import counted
from s3cache.cli._choosing import Where as _Where
from s3cache.cli._choosing import opened, until_done, whole_batches
from s3cache.cli._groups import grouped
from s3cache.cli._output import Output, size_text

__all__ = ["stats"]


@grouped(where=_Where, out=Output)
def stats(where: _Where, out: Output) -> None:
    """Count what is in the remote and in the local tier, and what is still to be uploaded.

    With --local, of the local tier only. What hit and missed is counted by each process that
    compiles: S3CACHE_SUMMARY=1 has it said at its end.
    """
    from s3cache.catalog import open_place
    from s3cache.settings import Settings

    found: dict[str, Any] = {}
    settings, _ = Settings.load(where.url)
    if settings.local:
        with opened(open_place(where.url, in_tier=True, of_all=True)) as place:
            found["local"] = {
                **_counted(place),
                "directory": settings.local_dir,
                "max_bytes": settings.local_max_bytes,
                "max_files": settings.local_max_files,
                "to_upload": len(until_done(place.to_upload())),
            }
    if settings.url is not None and not where.local:
        with opened(open_place(where.url)) as place:
            found["remote"] = {**_counted(place), "url": place.store.url}
    if out.json:
        out.record(found)
        return
    for name, tier in found.items():
        place_of = tier.get("url") or tier["directory"]
        out.line(f"{name}: {place_of}")
        out.line(
            f"  {counted(tier['entries'], 'entry', 'entries')} under "
            f"{counted(tier['keys'], 'key')}, {size_text(tier['bytes'])}"
        )
        if name == "local":
            share = tier["bytes"] / tier["max_bytes"]
            out.line(f"  {share:.0%} of {size_text(tier['max_bytes'])}")
            out.line(f"  {tier['to_upload']} to upload")


def _counted(place: Any) -> dict[str, int]:
    from s3cache.catalog import scan

    entries = size = firsts = 0
    here: set[str] = set()
    for batch in whole_batches(scan(place.store, is_local=place.is_local)):
        entries += len(batch)
        size += sum(item.size for item in batch)
        # There is one first entry to a key. A local tier may have others only, and is bounded.
        if place.is_local:
            here.update(item.name.rpartition(".")[0] for item in batch)
        else:
            firsts += sum(item.name.endswith(".0") for item in batch)
    return {"entries": entries, "keys": len(here) if place.is_local else firsts, "bytes": size}
