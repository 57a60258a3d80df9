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
import stat
from collections.abc import Iterator, Mapping

from s3cache.torch_api import internals

__all__ = ["remember_installation"]

_FILE = "installation.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def remember_installation(directory: str) -> None:
    """Give torch the hash that an earlier process computed; else compute it, and keep it."""
    fingerprint = _fingerprint(internals.torch_directory())
    path = os.path.join(directory, _FILE)
    known = _read(path)
    if known.get("fingerprint") == fingerprint:
        with contextlib.suppress(ValueError):  # not hexadecimal
            internals.set_torch_key(bytes.fromhex(str(known.get("torch_key"))))
        return
    _write(path, {"fingerprint": fingerprint, "torch_key": internals.torch_key.get()().hex()})


def _fingerprint(root: str) -> str:
    whole = hashlib.sha256(root.encode())
    # As text, which the garbage collector, busy enough while torch is imported, need not look at.
    for file in sorted(_source_files(root)):
        whole.update(file.encode())
    return whole.hexdigest()


def _source_files(root: str) -> Iterator[str]:
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name not in ("__pycache__", "lib", "include", "bin", "share"):
                    yield from _source_files(entry.path)
            elif entry.name.endswith((".py", ".so", ".cpp", ".ld")):
                status = entry.stat()
                yield f"{entry.path}\0{status.st_size}\0{status.st_mtime_ns}\n"


def _read(path: str) -> dict[str, object]:
    try:
        with open(path, encoding="utf-8", opener=_no_link) as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return {}  # somebody else's word
            content: object = json.load(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _write(path: str, value: Mapping[str, object]) -> None:
    staged = f"{path}.{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        with open(os.open(staged, _NEW, 0o600), "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(staged, path)
