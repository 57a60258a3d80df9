"""The line of the user's program that torch compiles now."""

from __future__ import annotations

import functools
import os
import re
import sys

from s3cache.torch_api import internals

_NO_FILE = re.compile(r"<(?!stdin>|string>)")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def users_line() -> tuple[str, int, str] | None:
    """Return file, line and function of the first frame outside of torch that called the compiler.

    Frames between our caller and Dynamo belong to users' backends and do not count.
    """
    compiler, torchs = _places()
    found = None
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_filename
        if name.startswith(compiler):
            found = None
        elif found is None and not name.startswith(torchs) and not _NO_FILE.match(name):
            found = name, frame.f_lineno, frame.f_code.co_name
    return found


@functools.cache
def _places() -> tuple[str, tuple[str, ...]]:
    torch = internals.torch_directory()
    stdlib = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
    # Files of the standard library with frames in between.
    between = (stdlib + "contextlib.py", stdlib + "functools.py", stdlib + "threading.py")
    return os.path.join(torch, "_dynamo") + os.sep, (torch, _OURS, *between)
