"""What g++ makes for Inductor, kept for all machines of the tests and for later runs.

Tests start many machines with empty disks that compile the same kernels, which takes seconds each.
A script named ``g++``, first in ``PATH``, starts the compiler only for what it has not seen: the
same source, options, compiler, processor, torch and Python. Machines still call ``g++`` as often as
without it, so that what counts these calls counts the same.

``S3CACHE_TEST_COMPILED=off`` leaves it out: of a run, or of one machine as its environment.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2] / "build" / "compiled"
_SCRIPT = Path(__file__).with_name("compiled.sh")
_MOST_BYTES = 2 << 30


def put_first(root: Path = _ROOT) -> None:
    """Put the script first in ``PATH``, where there is a g++ and no other compiler is named.

    Args:
        root: where the script and what it keeps are.
    """
    if os.environ.get("S3CACHE_TEST_COMPILED") == "off" or "CXX" in os.environ:
        return
    paths = os.environ.get("PATH", "").split(os.pathsep)
    real = shutil.which("g++")
    if sys.platform != "linux" or real is None or real.startswith(str(root)):
        return
    store = root / "kept"
    values = {
        "real": real,
        "store": str(store),
        "salt": _salt(real),
        "installed": sys.prefix,
        "base": sys.base_prefix,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    text = "\n".join(["#!/bin/sh", *lines, _SCRIPT.read_text(encoding="utf-8")])
    # Runs with another torch may go on beside this one.
    folder = root / hashlib.sha256(text.encode()).hexdigest()[:12]
    for each in (store, folder):
        each.mkdir(parents=True, exist_ok=True)
    script = folder / f"g++.{os.getpid()}"
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)
    script.replace(folder / "g++")
    _trim(store)
    os.environ["PATH"] = os.pathsep.join([str(folder), *paths])


def _salt(real: str) -> str:
    """A digest of all that an output depends on besides the command and its source."""
    # Which compiler it is, and what it takes for "native" here.
    said = subprocess.run(
        [real, "-march=native", "-v", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        check=False,
    )
    torch = find_spec("torch")
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    digest = hashlib.sha256(said.stdout + said.stderr + _SCRIPT.read_bytes())
    digest.update(version.read_bytes() if version else b"")
    digest.update(sys.version.encode())
    return digest.hexdigest()


def _trim(store: Path) -> None:
    """Remove what has not been used for longest where there is too much."""
    files = []
    for path in store.iterdir():
        with suppress(FileNotFoundError):
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)
