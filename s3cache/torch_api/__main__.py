"""``python -m s3cache.torch_api``: what s3cache uses of torch, and what the installed one lacks."""

from __future__ import annotations

import os
import sys

from s3cache.torch_api import installed_version, internals, survey

_VERDICTS = {  # by whether it is expected, and present
    (True, True): "there",
    (True, False): "MISSING",
    (False, True): "UNEXPECTED",
    (False, False): "absent",
}


def main() -> int:
    """Print a table; returns 1 if anything is not as declared."""
    # It is torch that is asked, not what the environment has s3cache make of it.
    os.environ["S3CACHE_AUTOLOAD"] = "0"
    rows = survey()
    for row in rows:
        releases = "{}.{}-".format(*row.since) if any(row.since) else "all"
        verdict = _VERDICTS[row.expected, row.present]
        sys.stdout.write(f"{verdict:10} {releases:5}  {row.name}\n")
    wrong = sum(row.expected != row.present for row in rows)
    known = "untested" if internals.is_untested() else "supported"
    supported = known if internals.is_supported() else "not supported"
    sys.stdout.write(
        f"torch {installed_version()}, {supported}: {len(rows)} names, {wrong} not as declared\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
