"""The account as a table."""

from __future__ import annotations

from collections.abc import Iterator

from tests.soak.run import MACHINES, PROCESSES, Account

__all__ = ["complaints", "table"]


def complaints(account: Account) -> Iterator[str]:
    """What must not be."""
    if account.lost:
        yield f"lost {len(account.lost)} of {account.acknowledged}, as {account.lost[:5]}"
    if account.wrong:
        yield f"wrong: {account.wrong[:5]}"
    for each in account.growth:
        if not each.is_flat:
            yield f"{each.what} grew from {each.early:g} to {each.late:g}"
    yield from (f"a process failed: {error}" for error in account.errors[:3])


def table(account: Account, server: str, seed: int) -> str:
    """Markdown."""
    counts, entries = account.counts, account.acknowledged
    minutes, misses = f"{account.seconds / 60:.0f} minutes", _told(account.misses)
    lines = [
        f"{PROCESSES} processes, {MACHINES} machines, {server}, {minutes}, seed {seed}.",
        "",
        "| | |",
        "|---|---|",
        f"| saves that were acknowledged | {counts['saved']:,}, of {entries:,} entries |",
        f"| saves that were not | {counts['refused']:,} |",
        f"| lookups | {counts['hit']:,} hits, {counts['miss']:,} misses ({misses}) |",
        f"| **lost** | {len(account.lost)} |",
        f"| **wrong** | {len(account.wrong)} |",
        *(
            f"| {kind}: slowest, and 99 of 100 | {account.slowest_ms[kind]:,.0f} ms, "
            f"{account.p99_ms[kind]:,.0f} ms |"
            for kind in sorted(account.slowest_ms)
        ),
        f"| what happened | {_told(account.happened)} |",
        *(
            f"| {_NAMES[each.what]}: early, late, most | {each.early:,.0f}, {each.late:,.0f}, "
            f"{each.most:,.0f} |"
            for each in account.growth
        ),
        "",
    ]
    return "\n".join(lines)


_NAMES = {
    "memory_mib": "memory of a process (MiB)",
    "threads": "threads",
    "sockets": "sockets",
    "files": "other open files",
}


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "none"
