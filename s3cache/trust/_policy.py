"""The trust policy: decide which entries are used, from the settings and the machine's own file.

The file is for the machine's administrator. Root owns it, and it applies to every process::

    {"trust": "require", "trusted_keys": ["main=ci:dHJ1c3Q..."], "revoked": ["3f1c..."]}

Every name is optional. ``trust`` is the minimum level, ``trusted_keys`` replaces the settings'
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
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from s3cache.errors import ConfigError, CorruptError, UntrustedError
from s3cache.trust._keys import Signature, SigningKey, VerifyKey, check_name, unpack
from s3cache.util.text import may_be_a_key

#: The default audience of signatures.
AUDIENCE: Final = "main"

#: The levels, from weakest to strictest.
TrustMode: TypeAlias = Literal["off", "prefer", "require"]

#: Why an entry is not trusted; with several signatures, the last cause in this order.
Cause: TypeAlias = Literal[
    "unsigned", "unknown-key", "other-audience", "expired", "revoked", "bad-signature"
]
# Clocks differ: a signature may be this much newer than the local time.
_SKEW_S: Final = 3600

MACHINE_FILE: Final = "/etc/s3cache/trust.json"

_MAX_FILE_BYTES: Final = 1 << 20
# A larger file is not a key file.
_MAX_KEY_BYTES: Final = 4096


@dataclass(frozen=True)
class Trusted:
    """A key, and the audience for which it may sign."""

    audience: str
    key: VerifyKey


def parse_trusted(text: str, *, audience: str) -> tuple[Trusted, ...]:
    """Parse keys in settings: ``audience=name:base64``, separated by spaces or commas."""
    pairs = (word.split("=", 1) for word in for_audience(text, audience).split())
    return tuple(Trusted(check_name("audience", to), VerifyKey.parse(key)) for to, key in pairs)


def for_audience(text: str, audience: str) -> str:
    """Return the keys with ``audience`` for those that are written without one."""
    # The padding of base64 is an equals sign too: an audience has no colon before it.
    return " ".join(
        word if "=" in word and ":" not in word.partition("=")[0] else f"{audience}={word}"
        for word in text.replace(",", " ").split()
    )


@dataclass(frozen=True)
class Policy:
    """Decides which entries are trusted.

    ``require`` uses only entries signed by a trusted key. ``prefer`` also uses entries that are
    unsigned or signed by an unknown key, but none with a bad signature. ``off`` checks nothing.
    """

    level: TrustMode = "off"
    trusted: tuple[Trusted, ...] = ()
    revoked_keys: frozenset[str] = frozenset()  # fingerprints: their signatures are void
    revoked_digests: frozenset[bytes] = frozenset()  # single entries that are not used
    now: Callable[[], float] = field(default=time.time, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.level == "require" and not self.trusted:
            raise ConfigError(
                "setting trust",
                "is 'require', but no key is trusted: no entry could be used",
                "set trusted_keys",
            )

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify the level, the keys and the revocations."""
        keys = (f"{one.audience}={one.key.name}:{one.key.fingerprint}" for one in self.trusted)
        digests = (digest.hex() for digest in self.revoked_digests)
        words = [*sorted(keys), *sorted(self.revoked_keys), *sorted(digests)]
        return hashlib.sha256(" ".join([self.level, *words]).encode()).hexdigest()[:16]

    def check(self, digest: bytes, block: bytes) -> Signature | None:
        """Return the signature that makes an entry trusted; ``None`` if none is required.

        Only its digest and the block of its signatures are known; the rest was not parsed.

        Raises:
            UntrustedError: the entry may not be used.
        """
        if self.level == "off":
            return None
        if digest in self.revoked_digests:
            raise UntrustedError("revoked", "this entry is on the list of revoked entries")
        try:
            signatures = unpack(block)
        except CorruptError as exc:
            raise UntrustedError("bad-signature", str(exc)) from None
        problems: dict[Cause, str] = {"unsigned": "it has no signature"}
        for signature in signatures:
            problem = self._problem(signature, digest)
            if problem is None:
                return signature
            problems[problem] = f"signed by {signature.signer!r} for {signature.audience!r}"
        cause = max(problems, key=get_args(Cause).index)
        if self.level == "prefer" and cause in ("unsigned", "unknown-key"):
            return None
        raise UntrustedError(cause, problems[cause])

    def _problem(self, signature: Signature, digest: bytes) -> Cause | None:
        """Return the problem with a signature, or None."""
        named = [each for each in self.trusted if each.key.name == signature.signer]
        if not named:
            return "unknown-key"
        proving = [each for each in named if each.key.proves(signature, digest)]
        if not proving:
            return "bad-signature"
        valid = [each for each in proving if each.key.fingerprint not in self.revoked_keys]
        if not valid:
            return "revoked"
        if all(each.audience != signature.audience for each in valid):
            return "other-audience"
        now = self.now()
        if signature.issued_s > now + _SKEW_S or 0 < signature.expires_s <= now:
            return "expired"
        return None


# -- from settings and files


def policy_of(
    level: TrustMode | None,
    trusted_keys: str,
    revoked: str,
    *,
    audience: str,
    machine_file: str = MACHINE_FILE,
) -> Policy:
    """Return the policy of the settings and the machine's file, if there is one.

    A ``level`` of ``None`` is ``require`` if any key is trusted, and else ``off``.

    Raises:
        ConfigError: one of them cannot be used, or no entry could ever be used.
    """
    check_name("option audience", audience)
    machine = _read_machine_file(machine_file)
    least = cast("TrustMode | None", machine.get("trust"))
    machine_keys = " ".join(machine.get("trusted_keys", ()))
    if machine_keys:
        # Settings cannot change the machine's keys, not even their audience.
        trusted = parse_trusted(machine_keys, audience=AUDIENCE)
        least = least or "require"
    else:
        trusted = parse_trusted(trusted_keys, audience=audience)
    levels = [one for one in (least, level) if one is not None]
    otherwise: TrustMode = "require" if trusted else "off"
    words = " ".join((revoked, *machine.get("revoked", ()))).replace(",", " ").lower().split()
    for number, word in enumerate(words, 1):
        if not re.fullmatch(r"[0-9a-f]{32}|[0-9a-f]{64}", word):
            raise ConfigError(
                f"revoked, word {number}" if may_be_a_key(word) else f"revoked {word[:80]!r}",
                "is neither a key's fingerprint nor an entry's digest",
                "give 32 or 64 hexadecimal digits",
            )
    return Policy(
        max(levels, key=get_args(TrustMode).index, default=otherwise),
        trusted,
        revoked_keys=frozenset(word for word in words if len(word) == 32),
        revoked_digests=frozenset(bytes.fromhex(word) for word in words if len(word) == 64),
    )


def _read_machine_file(path: str) -> dict[str, Any]:
    """Read the machine's file; return an empty mapping if there is none."""
    thing = f"trust file {path}"
    try:
        about, text = _read_file(path, _MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as exc:
        problem = f"cannot be opened ({exc.strerror})"
        raise ConfigError(thing, problem, "let all users read it") from None
    if about.st_uid != 0 or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fix = f"chown root {path}; chmod 644 {path}"
        raise ConfigError(thing, "is writable by users other than root", fix)
    try:
        content: Any = json.loads(text)
        lists = [content.get(name, []) for name in ("trusted_keys", "revoked")]
        is_right = (
            content.keys() <= {"trust", "trusted_keys", "revoked"}
            and content.get("trust") in (None, *get_args(TrustMode))
            and all(isinstance(words, list) for words in lists)
            and all(isinstance(word, str) for words in lists for word in words)
        )
    except (AttributeError, TypeError, ValueError):
        is_right = False
    if not is_right:
        fix = 'write {"trust": "off|prefer|require", "trusted_keys": [...], "revoked": [...]}'
        raise ConfigError(thing, "has other content", fix)
    return cast("dict[str, Any]", content)


def signing_key_of(text: str) -> SigningKey | None:
    """Return the key of a setting: the path of a file, or the key itself, like a CI secret."""
    if not text:
        return None
    if ":" in text and not text.startswith(("/", ".", "~")):
        return SigningKey.parse(text)
    return read_secret(os.path.expanduser(text))


def read_secret(path: str) -> SigningKey:
    """Read the signing key in a file that others can neither read nor write.

    Its group may read it: secrets are mounted in this way for programs that are not root.
    """
    thing, fix = f"signing key file {path}", f"chmod 600 {path}"
    if may_be_a_key(path):  # a secret in place of a path
        thing, fix = "signing key file", "chmod 600 it"
    try:
        about, data = _read_file(path, _MAX_KEY_BYTES + 1)
    except OSError as exc:
        raise ConfigError(thing, f"cannot be opened ({exc.strerror})", "give another") from None
    if about.st_uid not in (os.geteuid(), 0):
        raise ConfigError(thing, f"belongs to user {about.st_uid}", "own it yourself")
    if stat.S_ISREG(about.st_mode) and about.st_mode & 0o027:
        raise ConfigError(thing, f"has mode {stat.S_IMODE(about.st_mode):04o}", fix)
    if not 0 < len(data) <= _MAX_KEY_BYTES or not data.isascii():
        raise ConfigError(thing, "is not a file with a key", "give the file that keygen wrote")
    return SigningKey.parse(data.decode("ascii"))


def _read_file(path: str, at_most: int) -> tuple[os.stat_result, bytes]:
    """Return the status of a file and its first bytes, none if it is not a regular file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(fd)
        return about, os.read(fd, at_most) if stat.S_ISREG(about.st_mode) else b""
    finally:
        os.close(fd)
