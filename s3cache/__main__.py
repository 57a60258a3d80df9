"""``python -m s3cache`` and the installed command ``s3cache``: one program, see ``s3cache.cli``."""

import os
import sys


def command() -> None:
    """Run the command line and exit."""
    from s3cache.cli import main

    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    # `-m` has put the current directory first: a json.py there is not the one that we import.
    if sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    command()
