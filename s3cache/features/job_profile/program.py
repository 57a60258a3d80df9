"""The key of a program's job profiles, which is computed before the first compile."""

from __future__ import annotations

import contextlib
import email.parser  # noqa: F401 - what version() imports when it is called, which a fork must not see
import glob
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator

from s3cache.entries import LabelledKey, labelled_key
from s3cache.features.job_profile import KEYS
from s3cache.util import __version__

# How much of a program's file is hashed: it may be a large archive.
_PROGRAM_BYTES = 1 << 20

_PID = os.getpid()  # a forked child has another one


def program_key() -> LabelledKey:
    """Return the key of the profiles of this program, and of this process of a job.

    Return an empty one if the process runs no file, or is interactive.
    """
    script, *arguments = sys.argv or [""]
    if hasattr(sys, "ps1") or (program := _program(script)) is None:
        return LabelledKey()
    process, torch = sys.modules.get("multiprocessing.process"), ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = importlib.metadata.version("torch")
    parts: dict[str, object] = {
        "program": [*program, os.path.basename(script)],
        "arguments": sorted({*filter(None, map(_argument_name, arguments))}),
        "rank": os.environ.get("RANK", ""),
        "process": process.current_process().name if process else "MainProcess",
        "forked": os.getpid() != _PID,
        "s3cache": __version__,
        "torch": torch,
        "python": platform.python_version(),
        "machine": [platform.system(), platform.machine(), *sorted(set(_models()))],
    }
    return labelled_key(KEYS, parts.items())


def _program(script: str) -> tuple[str, int] | None:
    """Return a digest of the start of the program's file, and the size of the file."""
    # __main__ has an absolute path. A spawned child that is importing the program has argv only.
    for path in (getattr(sys.modules.get("__main__"), "__file__", None), script):
        with contextlib.suppress(OSError, TypeError, ValueError), open(path or "", "rb") as file:
            content = file.read(_PROGRAM_BYTES)
            return hashlib.sha256(content).hexdigest(), os.fstat(file.fileno()).st_size
    return None


def _argument_name(argument: str) -> str:
    """Return ``name`` of ``--name``, ``--name=value`` and ``name=value``; otherwise ""."""
    found = re.match(r"-*([A-Za-z][\w.-]*)(=|$)", argument)
    return found[1] if found and (found[2] or argument[0] == "-") else ""


def _models() -> Iterator[str]:
    """Yield the models of the processor and of NVIDIA's devices, if Linux lists them."""
    for path in ("/proc/cpuinfo", *glob.glob("/proc/driver/nvidia/gpus/*/information")):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            for line in file.read(4096).decode(errors="replace").splitlines():
                name, _, value = line.partition(":")
                if name.strip().lower() in ("model", "model name"):
                    yield value.strip()
