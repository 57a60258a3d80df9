"""Update the tables of docs/reasons.md and docs/errors.md from :mod:`s3cache.errors`.

.venv/bin/python -m infra.docs.reasons
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.render import fill
from s3cache import errors
from s3cache.seam import reasons

DOCS = Path(__file__).resolve().parents[2] / "docs"


def tables() -> dict[str, str]:
    """Return the table of each page, by the page's name."""
    rows = [(f"[`{reason}`](#{reason})", reason.text) for reason in reasons()]
    classes = []
    for name in sorted(errors.__all__):
        kind = getattr(errors, name)
        meaning = (kind.__doc__ or "").partition("\n")[0].replace("``", "`")
        code = f"[{kind.reason}](reasons.md#{kind.reason})"
        classes.append((f"[`{name}`](#{name.lower()})", meaning, code))
    return {
        "reasons.md": _table(("reason", "in words"), rows),
        "errors.md": _table(("class", "meaning", "reason of a miss"), classes),
    }


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    for name, table in tables().items():
        text = (DOCS / name).read_text(encoding="utf-8")
        (DOCS / name).write_text(fill(text, "table", table), encoding="utf-8")
