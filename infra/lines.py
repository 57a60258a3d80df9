"""Print the lines and files of the core, by room, and of each feature."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _room(path: Path) -> tuple[str, str]:
    """Return whether a file is of the core or of the features, and its room or feature."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "s3cache":
        return "core", "(beside the package)"
    if len(parts) > 3 and parts[1] == "features":
        return "features", parts[2]
    return "core", parts[1] if len(parts) > 2 else f"{parts[1]}.py"


def main() -> None:
    """Print a table."""
    lines, files = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for path in sorted([*(ROOT / "s3cache").rglob("*.py"), *ROOT.glob("_s3cache_*.py")]):
        size = len(path.read_text(encoding="utf-8").splitlines())
        for of in {_room(path), (_room(path)[0], "")}:
            lines[of] += size
            files[of] += 1
    for of, size in sorted(lines.items()):
        sys.stdout.write(f"{size:7,} lines {files[of]:4} files  {of[0]} {of[1]}\n")
    sys.stdout.write(f"{sum(size for of, size in lines.items() if not of[1]):7,} lines\n")


if __name__ == "__main__":
    main()
