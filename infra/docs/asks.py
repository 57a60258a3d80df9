"""Update the summary of Dynamo's questions in docs/recall.md from the table.

.venv/bin/python -m infra.docs.asks
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.render import fill
from infra import asks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recall.md"


def summary() -> str:
    """Return a row for each way to have an answer."""
    rows = asks.table()
    counts = Counter((row.how, release) for row in rows for release in row.digests)
    lines = [
        f"| how | | {' | '.join(asks.RELEASES)} |",
        f"|---|---|{'---|' * len(asks.RELEASES)}",
        *(
            f"| `{how}` | {words} | {' | '.join(str(counts[how, r]) for r in asks.RELEASES)} |"
            for how, words in asks.KINDS.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """Return ``page`` with the summary in its block."""
    return fill(page, "asks", summary())


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
