"""The trust policy: which entries are used, by the settings and the machine's own file.

The file is for the machine's administrator. It is root's, and applies to every process on it::

    {"trust": "require", "trusted_keys": ["main=ci:dHJ1c3Q..."], "revoked": ["3f1c..."]}

Each name may be left out. ``trust`` is the minimum level, ``trusted_keys`` replaces the settings'
list of trusted keys, and ``revoked`` adds to their revocations.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, cast, get_args

from s3cache.errors import ConfigError, CorruptError, UntrustedError
from s3cache.trust._keys import SigningKey, VerifyKey, read_file, read_secret
from s3cache.trust._signatures import Signature, check_name, unpack
from s3cache.util.words import may_be_a_key

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

#: The default audience of signatures.
AUDIENCE: Final = "main"

#: From the one that asks for least to the one that asks for most.
Level: TypeAlias = Literal["off", "prefer", "require"]

#: Why an entry is not trusted; of several signatures the last of these that is true of one.
Cause: TypeAlias = Literal[
    "unsigned", "unknown-key", "other-audience", "expired", "revoked", "bad-signature"
]
# Clocks differ: a signature may have been made so much later than it is here now.
_SKEW_S: Final = 3600

MACHINE_FILE: Final = "/etc/s3cache/trust.json"

_MAX_FILE_BYTES: Final = 1 << 20
_FIELDS: Final = {"trust": str, "trusted_keys": list, "revoked": list}


@dataclass(frozen=True)
class Trusted:
    """A key, and the audience that it may sign for."""

    audience: str
    key: VerifyKey


def parse_trusted(text: str, *, audience: str) -> tuple[Trusted, ...]:
    """Read keys as settings have them: ``audience=name:base64``, apart by spaces or commas.

    Args:
        audience: of keys that are written without one.

    Raises:
        ConfigError: one is no key.
    """
    pairs = (word.partition("=") for word in for_audience(text, audience).split())
    return tuple(
        Trusted(check_name("audience", before), VerifyKey.parse(after))
        for before, _, after in pairs
    )


def for_audience(text: str, audience: str) -> str:
    """Return the same keys, each with an audience: ``audience`` where it is written without."""
    # The padding of base64 is an equals sign too: an audience has no colon before its own.
    return " ".join(
        word if "=" in word and ":" not in word.partition("=")[0] else f"{audience}={word}"
        for word in text.replace(",", " ").split()
    )


@dataclass(frozen=True)
class Policy:
    """Decides which entries are trusted.

    Attributes:
        level: ``require`` uses only entries signed by a trusted key; ``prefer`` also uses entries
            that are unsigned or signed by an unknown key, but none with a bad signature; ``off``
            checks nothing.
        trusted: keys with the audience of each.
        revoked_keys: fingerprints of keys with void signatures, whenever made.
        revoked_digests: digests of single entries that are not used.
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
    def is_on(self) -> bool:
        """Return whether :meth:`check` may refuse anything."""
        return self.level != "off"

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that stand for the level, the keys and the revocations."""
        words = sorted(
            f"{each.audience}={each.key.name}:{each.key.fingerprint}" for each in self.trusted
        )
        words += sorted(self.revoked_keys) + sorted(each.hex() for each in self.revoked_digests)
        return hashlib.sha256(" ".join([self.level, *words]).encode()).hexdigest()[:16]

    def check(self, digest: bytes, block: bytes) -> Signature | None:
        """Decide whether the entry with that digest is used; nothing else of it was parsed.

        Args:
            block: its signatures, as they lie in it; empty where there are none.

        Returns:
            The signature that makes it trusted; ``None`` where none is required.

        Raises:
            UntrustedError: it is not used.
        """
        if not self.is_on:
            return None
        if digest in self.revoked_digests:
            raise UntrustedError("revoked", "this very entry is on the list of revoked ones")
        try:
            signatures = unpack(block)
        except CorruptError as exc:
            raise UntrustedError("bad-signature", str(exc)) from None
        problems: dict[Cause, str] = {"unsigned": "it has no signature"}
        for signature in signatures:
            problem = self._problem(signature, digest)
            if problem is None:
                return signature
            statement = signature.statement
            problems[problem] = f"signed by {statement.signer!r} for {statement.audience!r}"
        cause = max(problems, key=get_args(Cause).index)
        if self.level == "prefer" and cause in ("unsigned", "unknown-key"):
            return None
        raise UntrustedError(cause, problems[cause])

    def _problem(self, signature: Signature, digest: bytes) -> Cause | None:
        """Return what is wrong with a signature, if anything is.

        It is verified first: its own claims mean nothing before.
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


# -- from settings and the machine's file


def policy_of(
    level: Level | None,
    trusted_keys: str,
    revoked: str,
    *,
    audience: str,
    machine_file: str = MACHINE_FILE,
) -> Policy:
    """Return the policy that the settings and the machine's file, if there is one, ask for.

    Args:
        level: ``None`` for ``require`` where any key is trusted, and else ``off``.
        trusted_keys: see :func:`~s3cache.trust.parse_trusted`.
        revoked: fingerprints of keys and digests of entries, apart by spaces or commas.

    Raises:
        ConfigError: one of them cannot be used, or no entry could be.
    """
    machine = _read_machine_file(machine_file)
    least = cast("Level | None", machine.get("trust"))
    levels = get_args(Level)
    if least is not None and least not in levels:
        raise _unusable(machine_file, f"trust is {least!r}", "use off, prefer or require")
    machine_keys = _words(machine, "trusted_keys", machine_file)
    if machine_keys:
        # Settings do not change the machine's keys, not even their audience.
        trusted = parse_trusted(machine_keys, audience=AUDIENCE)
        least = least or "require"
    else:
        trusted = parse_trusted(trusted_keys, audience=audience)
    given = [each for each in (least, level) if each is not None]
    otherwise: Level = "require" if trusted else "off"
    keys, digests = _parse_revoked(f"{revoked} {_words(machine, 'revoked', machine_file)}")
    return Policy(
        max(given, key=levels.index, default=otherwise),
        trusted,
        revoked_keys=keys,
        revoked_digests=digests,
    )


def signing_key_of(text: str) -> SigningKey | None:
    """Return the key that a setting names: a file's path, or the key itself, as CI secrets are.

    Raises:
        ConfigError: it is none, or others may read the file.
    """
    if not text:
        return None
    if ":" in text and not text.startswith(("/", ".", "~")):
        return SigningKey.parse(text)
    return read_secret(os.path.expanduser(text))


def _read_machine_file(path: str) -> dict[str, object]:
    """Return what the machine's file says; nothing if there is none.

    Raises:
        ConfigError: there is one that cannot be relied on.
    """
    try:
        about, text = read_file(path, _MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as exc:
        fix = "let all users read it"
        raise _unusable(path, f"cannot be opened ({exc.strerror})", fix) from None
    if about.st_uid != 0 or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fix = f"chown root {path}; chmod 644 {path}"
        raise _unusable(path, "is not root's alone to write", fix)
    try:
        found: object = json.loads(text)
    except ValueError:
        raise _unusable(path, "is no JSON", "write an object") from None
    if not isinstance(found, dict) or not found.keys() <= _FIELDS.keys():
        raise _unusable(path, "is something else", f"write an object of {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
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
    keys = frozenset(word for word in words if len(word) == 32)
    return keys, frozenset(bytes.fromhex(word) for word in words if len(word) == 64)


def _unusable(path: str, cause: str, fix: str) -> ConfigError:
    return ConfigError(f"trust file {path}", cause, fix)
