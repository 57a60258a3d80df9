"""``python -m s3cache`` and the installed command ``s3cache``: one program, see ``s3cache.cli``."""

from __future__ import annotations

import sys

from s3cache.cli import main

__all__ = ["command"]


def command() -> None:
    """The installed command: its directory is not where programs import from."""
    from s3cache._programs import leave_script

    leave_script()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
