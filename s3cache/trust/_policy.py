"""The trust policy: which entries are used, by the settings and the machine's own file.

The file is for the machine's administrator. It is root's, and says for every process on it::

    {"trust": "require", "trusted_keys": ["main=ci:dHJ1c3Q..."], "revoked": ["3f1c..."]}

Each name may be left out. What it asks for is the least that is asked for; where it names keys no
others are trusted; what it revokes is revoked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, cast, get_args

from s3cache._words import may_be_a_key
from s3cache.errors import ConfigError, CorruptError, UntrustedError
from s3cache.trust._keys import SigningKey, VerifyKey, read_secret
from s3cache.trust._signatures import Signature, check_name, unpack

__all__ = [
    "AUDIENCE",
    "MACHINE_FILE",
    "Cause",
    "Level",
    "Policy",
    "Trusted",
    "for_audience",
    "parse_trusted",
    "policy_of",
    "signing_key_of",
]

#: For whom is signed where nothing is said.
AUDIENCE: Final = "main"

Level: TypeAlias = Literal["off", "prefer", "require"]

#: Why an entry is not trusted; of several signatures the last of these that is true of one.
Cause: TypeAlias = Literal[
    "unsigned", "unknown-key", "other-audience", "expired", "revoked", "bad-signature"
]
_CAUSES: Final[tuple[Cause, ...]] = (
    "unsigned",
    "unknown-key",
    "other-audience",
    "expired",
    "revoked",
    "bad-signature",
)
# Clocks differ: a signature may have been made so much later than it is here now.
_SKEW_S: Final = 3600

MACHINE_FILE: Final = "/etc/s3cache/trust.json"

_MAX_FILE_BYTES: Final = 1 << 20
_NAMES: Final = {"trust": str, "trusted_keys": list, "revoked": list}


@dataclass(frozen=True)
class Trusted:
    """A key, and what it may sign for."""

    audience: str
    key: VerifyKey


def parse_trusted(text: str, *, audience: str) -> tuple[Trusted, ...]:
    """Keys as settings have them: ``audience=name:base64``, apart by spaces or commas.

    Args:
        audience: of keys that are written without one.

    Raises:
        ConfigError: one is no key.
    """
    found = []
    for word in for_audience(text, audience).split():
        before, _, after = word.partition("=")
        found.append(Trusted(check_name("audience", before), VerifyKey.parse(after)))
    return tuple(found)


def for_audience(text: str, audience: str) -> str:
    """The same keys, each with its audience: that one, where it is written without."""
    # The padding of base64 is an equals sign too: an audience has no colon before its own.
    return " ".join(
        word if "=" in word and ":" not in word.partition("=")[0] else f"{audience}={word}"
        for word in text.replace(",", " ").split()
    )


@dataclass(frozen=True)
class Policy:
    """What makes an entry trusted here.

    Attributes:
        level: ``require`` uses nothing that no trusted key signed; ``prefer`` uses what nobody
            signed, or nobody known here, but nothing that is signed wrongly; ``off`` does not look.
        trusted: keys with what each may sign for.
        revoked_keys: fingerprints of keys whose signatures are worth nothing, whenever made.
        revoked_digests: of single entries.
        now: Unix time in seconds.
    """

    level: Level = "off"
    trusted: tuple[Trusted, ...] = ()
    revoked_keys: frozenset[str] = frozenset()
    revoked_digests: frozenset[bytes] = frozenset()
    now: Callable[[], float] = field(default=time.time, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.level == "require" and not self.trusted:
            raise ConfigError(
                "setting trust",
                "is 'require', and no key is trusted: nothing could be used",
                "set trusted_keys",
            )

    @property
    def judges(self) -> bool:
        """Whether anything may come of :meth:`judge` but leave."""
        return self.level != "off"

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that tell whom it trusts, and what it has revoked."""
        parts = sorted(
            f"{each.audience}={each.key.name}:{each.key.fingerprint}" for each in self.trusted
        )
        parts += sorted(self.revoked_keys) + sorted(each.hex() for each in self.revoked_digests)
        return hashlib.sha256(" ".join([self.level, *parts]).encode()).hexdigest()[:16]

    def judge(self, digest: bytes, block: bytes) -> Signature | None:
        """Decide whether the entry with that digest is used; nothing else of it was looked at.

        Args:
            block: its signatures, as they lie in it; empty where there are none.

        Returns:
            The signature that makes it trusted; ``None`` where none is asked for.

        Raises:
            UntrustedError: it is not used.
        """
        if self.level == "off":
            return None
        if digest in self.revoked_digests:
            raise UntrustedError("revoked", "this very entry is on the list of revoked ones")
        try:
            signatures = unpack(block)
        except CorruptError as exc:
            raise UntrustedError("bad-signature", str(exc)) from None
        found: dict[Cause, str] = {"unsigned": "nobody signed it"}
        for signature in signatures:
            verdict = self._verdict(signature, digest)
            if verdict is None:
                return signature
            statement = signature.statement
            found[verdict] = f"signed by {statement.signer!r} for {statement.audience!r}"
        cause = max(found, key=_CAUSES.index)
        if self.level == "prefer" and cause in ("unsigned", "unknown-key"):
            return None
        raise UntrustedError(cause, found[cause])

    def _verdict(self, signature: Signature, digest: bytes) -> Cause | None:
        """What is wrong with it, if anything is.

        It is proven first: what it says of itself means nothing before.
        """
        statement = signature.statement
        named = [each for each in self.trusted if each.key.name == statement.signer]
        if not named:
            return "unknown-key"
        proving = [each for each in named if each.key.proves(signature, digest)]
        if not proving:
            return "bad-signature"
        valid = [each for each in proving if each.key.fingerprint not in self.revoked_keys]
        if not valid:
            return "revoked"
        if all(each.audience != statement.audience for each in valid):
            return "other-audience"
        now = self.now()
        if statement.issued_s > now + _SKEW_S or 0 < statement.expires_s <= now:
            return "expired"
        return None


def strongest(levels: Iterable[Level | None], otherwise: Level) -> Level:
    """The level that asks for most of those that are set; ``otherwise`` if none is."""
    order: Mapping[Level, int] = {"off": 0, "prefer": 1, "require": 2}
    given = [level for level in levels if level is not None]
    return max(given, key=lambda level: order[level]) if given else otherwise


# -- from settings and the machine's file


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
