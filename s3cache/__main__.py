"""``python -m s3cache`` and the installed command ``s3cache``, see ``s3cache.cli``."""

import os
import sys


def command() -> None:
    """Run the command line and exit."""
    from s3cache.cli import main

    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    # `-m` puts the current directory first: do not import a json.py from there.
    if sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    command()
