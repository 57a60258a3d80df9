"""The command line: ``s3cache ...`` and ``python -m s3cache ...``.

What the commands do is done in the rooms above; here it is asked for and shown. Each command is a
function in a module of its own, registered in ``_app.py``; ``run`` alone is parsed by itself, so
that a program that is started by it has neither Typer nor Rich in its process.
"""

from s3cache.cli._main import main

__all__ = ["main"]
