"""``python -m s3cache.torch_api``: compare the declared names with the installed torch."""

from __future__ import annotations

import os
import sys

from s3cache.torch_api import installed_version, internals, survey


def main() -> int:
    """Print differences from the declarations, and a summary; return 1 if there are any."""
    # Examine torch itself, without the hooks that the environment may turn on.
    os.environ["S3CACHE_AUTOLOAD"] = "0"
    rows = survey()
    wrong = [row for row in rows if row.expected != row.present]
    for row in wrong:
        sys.stdout.write(f"{'MISSING' if row.expected else 'UNEXPECTED':10} {row.name}\n")
    known = "untested" if internals.is_untested() else "supported"
    supported = known if internals.is_supported() else "not supported"
    sys.stdout.write(
        f"torch {installed_version()}, {supported}: {len(rows)} names, "
        f"{len(wrong)} not as declared\n"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
