"""``python -m s3cache.torch_api``: what s3cache uses of torch, and what the installed one lacks."""

from __future__ import annotations

import os
import sys

from s3cache.torch_api import Row, installed_version, internals, survey


def main() -> int:
    """Print a table; returns 1 if anything is not as declared."""
    # It is torch that is asked, not what the environment has s3cache make of it.
    os.environ["S3CACHE_AUTOLOAD"] = "0"
    rows = survey()
    width = max(len(row.releases) for row in rows)
    for row in rows:
        sys.stdout.write(f"{_verdict(row):10} {row.releases:{width}}  {row.name}\n")
    wrong = sum(row.expected != row.present for row in rows)
    known = "untested" if internals.is_untested() else "supported"
    supported = known if internals.is_supported() else "not supported"
    sys.stdout.write(
        f"torch {installed_version()}, {supported}: {len(rows)} names, {wrong} not as declared\n"
    )
    return 1 if wrong else 0


def _verdict(row: Row) -> str:
    if row.expected:
        return "there" if row.present else "MISSING"
    return "UNEXPECTED" if row.present else "absent"


if __name__ == "__main__":
    sys.exit(main())
