"""Keep the output of g++ for Inductor, for all test machines and for later runs.

Tests start many machines with empty disks. They compile the same kernels, which takes seconds each.
A script named ``g++``, first in ``PATH``, copies the kept output if source, options, compiler,
processor, torch and Python are the same, and otherwise runs the compiler. Machines call ``g++`` as
often as without the script, so tests that count these calls count the same.

``S3CACHE_TEST_COMPILED=off`` turns it off: for a run, or in the environment of one machine.
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


def put_first() -> None:
    """Put the script first in ``PATH`` if g++ is installed and ``CXX`` is not set."""
    if os.environ.get("S3CACHE_TEST_COMPILED") == "off" or "CXX" in os.environ:
        return
    paths = os.environ.get("PATH", "").split(os.pathsep)
    real = shutil.which("g++")
    if sys.platform != "linux" or real is None or real.startswith(str(_ROOT)):
        return
    store = _ROOT / "kept"
    values = {
        "real": real,
        "store": str(store),
        "salt": _salt(real),
        "installed": sys.prefix,
        "base": sys.base_prefix,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    text = "\n".join(["#!/bin/sh", *lines, _SCRIPT.read_text(encoding="utf-8")])
    # Runs with another torch may be in progress at the same time.
    folder = _ROOT / hashlib.sha256(text.encode()).hexdigest()[:12]
    for each in (store, folder):
        each.mkdir(parents=True, exist_ok=True)
    script = folder / f"g++.{os.getpid()}"
    script.write_text(text, encoding="utf-8")
    script.chmod(0o755)
    script.replace(folder / "g++")
    _trim(store)
    os.environ["PATH"] = os.pathsep.join([str(folder), *paths])


def _salt(real: str) -> str:
    """Return a digest of everything that an output depends on besides command and source."""
    # The compiler's version, and the options that "native" means on this machine.
    described = subprocess.run(
        [real, "-march=native", "-v", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        check=False,
    )
    torch = find_spec("torch")
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    digest = hashlib.sha256(described.stdout + described.stderr + _SCRIPT.read_bytes())
    digest.update(version.read_bytes() if version else b"")
    digest.update(sys.version.encode())
    return digest.hexdigest()


def _trim(store: Path) -> None:
    """Remove the least recently used files if the store is too large."""
    files = []
    for path in store.iterdir():
        with suppress(FileNotFoundError):
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)
