"""The policy that settings and the machine's own file come to: nobody weakens another's.

The file is for whoever runs the machine. It is root's, and says for every process on it::

    {"trust": "require", "trusted_keys": ["main=ci:dHJ1c3Q..."], "revoked": ["3f1c..."]}

Each name may be left out. What it asks for is the least that is asked for; where it names keys no
others are trusted; what it revokes is revoked.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from typing import Final, cast, get_args

from s3cache._words import may_be_a_key
from s3cache.errors import ConfigError
from s3cache.trust._keys import SigningKey, read_secret
from s3cache.trust._policy import AUDIENCE, Level, Policy, parse_trusted, strongest

__all__ = ["MACHINE_FILE", "policy_of", "signing_key_of"]

MACHINE_FILE: Final = "/etc/s3cache/trust.json"

_MAX_FILE_BYTES: Final = 1 << 20
_NAMES: Final = {"trust": str, "trusted_keys": list, "revoked": list}


def policy_of(
    level: Level | None,
    trusted_keys: str,
    revoked: str,
    *,
    audience: str,
    machine_file: str = MACHINE_FILE,
) -> Policy:
    """What the settings ask for, and the machine's file, if there is one.

    Args:
        level: ``None`` for ``require`` where any key is trusted, and else ``off``.
        trusted_keys: see :func:`~s3cache.trust.parse_trusted`.
        revoked: fingerprints of keys and digests of entries, apart by spaces or commas.

    Raises:
        ConfigError: one of them cannot be used, or nothing could be.
    """
    machine = _read(machine_file)
    theirs = _words(machine, "trusted_keys", machine_file)
    # Settings say nothing of the machine's keys, not even for whom they sign.
    trusted = parse_trusted(theirs or trusted_keys, audience=AUDIENCE if theirs else audience)
    asked = machine.get("trust")
    if asked is not None and asked not in get_args(Level):
        raise _unusable(machine_file, f"trust is {asked!r}", "use off, prefer or require")
    least: Level | None = "require" if theirs and asked is None else cast("Level | None", asked)
    keys, digests = _parse_revoked(f"{revoked} {_words(machine, 'revoked', machine_file)}")
    return Policy(
        strongest([least, level], "require" if trusted else "off"),
        trusted,
        revoked_keys=keys,
        revoked_digests=digests,
    )


def signing_key_of(text: str) -> SigningKey | None:
    """The key that a setting names: a file's path, or the key itself, as secrets of CI are given.

    Raises:
        ConfigError: it is none, or others may read the file.
    """
    if not text:
        return None
    if ":" in text and not text.startswith(("/", ".", "~")):
        return SigningKey.parse(text)
    return read_secret(os.path.expanduser(text))


def _read(path: str) -> dict[str, object]:
    """The machine's file; nothing if there is none. One that cannot be relied on is an error."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as exc:
        raise _unusable(
            path, f"cannot be opened ({exc.strerror})", "let everybody read it"
        ) from None
    try:
        about = os.fstat(fd)
        text = os.read(fd, _MAX_FILE_BYTES) if stat.S_ISREG(about.st_mode) else b""
    finally:
        os.close(fd)
    if about.st_uid != 0 or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _unusable(
            path, "is not root's alone to write", f"chown root {path}; chmod 644 {path}"
        )
    try:
        found: object = json.loads(text)
    except ValueError:
        raise _unusable(path, "is no JSON", "write an object") from None
    if not isinstance(found, dict) or not found.keys() <= _NAMES.keys():
        raise _unusable(path, "is something else", f"write an object of {', '.join(_NAMES)}")
    for name, kind in _NAMES.items():
        if not isinstance(found.get(name, kind()), kind):
            raise _unusable(path, f"{name} is no {kind.__name__}", f"give a {kind.__name__}")
    return found


def _words(machine: dict[str, object], name: str, path: str) -> str:
    words = cast("list[object]", machine.get(name, []))
    if not all(isinstance(word, str) for word in words):
        raise _unusable(path, f"{name} holds what is no text", "give texts")
    return " ".join(map(str, words))


def _parse_revoked(text: str) -> tuple[frozenset[str], frozenset[bytes]]:
    words = text.replace(",", " ").lower().split()
    for number, word in enumerate(words, 1):
        if not re.fullmatch(r"[0-9a-f]{32}|[0-9a-f]{64}", word):
            raise ConfigError(
                f"revoked, word {number}" if may_be_a_key(word) else f"revoked {word[:80]!r}",
                "is neither a key's fingerprint nor an entry's digest",
                "give 32 or 64 hexadecimal digits",
            )
    keys: Iterable[str] = (word for word in words if len(word) == 32)
    digests = (bytes.fromhex(word) for word in words if len(word) == 64)
    return frozenset(keys), frozenset(digests)


def _unusable(path: str, cause: str, fix: str) -> ConfigError:
    return ConfigError(f"trust file {path}", cause, fix)
