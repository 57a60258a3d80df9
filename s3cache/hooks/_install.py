"""torch's hash of its own source, remembered from one process to the next.

torch reads and hashes all its Python files in each process that looks up a key. The result only
changes with the files: here it is kept with a fingerprint of their names, sizes and times, which
takes a fraction of the time, and is computed anew when that differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from typing import Any

__all__ = ["remember_installation"]

_FILE = "installation.json"


def remember_installation(directory: str) -> None:
    """Set ``torch_key()`` to what an earlier process found, or compute and keep it.

    Does nothing where torch already knows it, or where this torch gives no way to set it.
    """
    import torch
    from torch._inductor import codecache

    torch_key: Any = codecache.torch_key
    if not hasattr(torch_key, "set"):
        return
    fingerprint = _fingerprint(os.path.dirname(os.path.abspath(torch.__file__)))
    path = os.path.join(directory, _FILE)
    known = _read(path)
    if known.get("fingerprint") == fingerprint:
        # Known already, or not hexadecimal.
        with contextlib.suppress(AssertionError, RuntimeError, ValueError):
            torch_key.set(bytes.fromhex(str(known.get("torch_key"))))
        return
    _write(path, {"fingerprint": fingerprint, "torch_key": torch_key().hex()})


def _fingerprint(root: str) -> str:
    found = hashlib.sha256(root.encode())
    # As text, which the garbage collector, busy enough while torch is imported, need not look at.
    for file in sorted(_python_files(root)):
        found.update(file.encode())
    return found.hexdigest()


def _python_files(root: str) -> Iterator[str]:
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name not in ("__pycache__", "lib", "include", "bin", "share"):
                    yield from _python_files(entry.path)
            elif entry.name.endswith((".py", ".so", ".cpp", ".ld")):
                status = entry.stat()
                yield f"{entry.path}\0{status.st_size}\0{status.st_mtime_ns}\n"


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: str, value: dict[str, Any]) -> None:
    staged = f"{path}.{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        with open(staged, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(staged, path)
