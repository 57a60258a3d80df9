r"""Decide which entries are trusted: signatures in frames, the keys for them, and a policy.

::

    block      = signature*                    at most 16, nothing between or after them
    signature  = statement value
    statement  =  0  algorithm       u8        1 Ed25519 (RFC 8032), 2 HMAC-SHA256 (RFC 2104)
                  1  signer_size     u8
                  2  audience_size   u8
                  3  value_size      u8
                  4  issued_s        u64       Unix time in seconds
                 12  expires_s       u64       Unix time of its expiry; 0 for never
                 20  signer, audience          names
    value      = the signature, over  "s3cache entry signature 1" 00 digest statement

Integers are big-endian. The digest is that of the frame (:mod:`s3cache.frame`), which covers its
version, header and sections, and so its key and variant. The statement begins with its own sizes,
so no two statements have equal bytes. A signature for the audience ``pulls`` is void in ``main``.

Ed25519 keys have the format of Nix's binary caches, and both tools can make them
(https://nix.dev/manual/nix/latest/command-ref/new-cli/nix3-key-generate-secret)::

    public   name:base64(32 bytes)
    secret   name:base64(seed, 32 bytes, and public key, 32 bytes)

A shared secret is ``name:hmac-sha256:base64(32 bytes or more)`` for both.

Ed25519 is libsodium's, through PyNaCl. It takes half as long as OpenSSL's, lets other threads run
meanwhile, and refuses values that only forgers use: numbers that are not reduced, keys and points
of small order (https://doc.libsodium.org/public-key_cryptography/public-key_signatures).

The policy comes from the settings and from the machine's own file, which root owns::

    {"trust": "require", "trusted_keys": ["main=ci:dHJ1c3Q..."], "revoked": ["3f1c..."]}

Every name is optional. ``trust`` is the minimum level, ``trusted_keys`` replaces the settings'
list of trusted keys, and ``revoked`` adds to their revocations.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from s3cache.errors import ConfigError, CorruptError, TransientError, UntrustedError
from s3cache.util.text import may_be_a_key
from s3cache.util.threads import DeadlineExecutor

MAX_SIGNATURES: Final = 16

_DOMAIN: Final = b"s3cache entry signature 1\x00"
_FIELDS: Final = struct.Struct(">BBBBQQ")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}")
_HMAC: Final = "hmac-sha256"
_KEY_BYTES: Final = 32


class Algorithm(IntEnum):
    """The algorithm of a signature; a key is for exactly one."""

    ED25519 = 1
    HMAC_SHA256 = 2

    @property
    def size(self) -> int:
        """The size of a signature in bytes."""
        return 64 if self is Algorithm.ED25519 else 32


@dataclass(frozen=True, slots=True)
class Signature:
    """A signer's statement about an entry, and the value that proves it."""

    signer: str  # the name of its key
    audience: str  # the purpose of the signature
    issued_s: int  # Unix time in seconds
    expires_s: int = 0  # Unix time in seconds; 0 for never
    value: bytes = b""
    algorithm: Algorithm = Algorithm.ED25519

    @property
    def statement(self) -> bytes:
        signer, audience = self.signer.encode(), self.audience.encode()
        sizes = len(signer), len(audience), self.algorithm.size
        fields = _FIELDS.pack(self.algorithm, *sizes, self.issued_s, self.expires_s)
        return fields + signer + audience

    def over(self, digest: bytes) -> bytes:
        """Return the bytes to sign."""
        return _DOMAIN + digest + self.statement


def check_name(thing: str, name: str) -> str:
    """Return ``name``, or raise :class:`ConfigError` if it is not a legal signer or audience."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            # Text before an equals sign may be a key without its padding.
            thing if may_be_a_key(f"{name}=") else f"{thing} {name[:80]!r}",
            "is not 1 to 128 of A-Z a-z 0-9 . _ / @ + - that begin with a letter or digit",
            "use a name such as ci-main-1",
        )
    return name


def pack(signatures: Iterable[Signature]) -> bytes:
    """Pack the signatures into a block, in order."""
    return b"".join(signature.statement + signature.value for signature in signatures)


def unpack(block: bytes) -> list[Signature]:
    """Unpack a block of signatures, or raise :class:`CorruptError`. They are not verified yet."""
    signatures: list[Signature] = []
    at = 0
    try:
        while at < len(block):
            number, *sizes, issued_s, expires_s = _FIELDS.unpack_from(block, at)
            ends = [*accumulate(sizes, initial=at + _FIELDS.size)]
            signer, audience, value = (block[start:end] for start, end in pairwise(ends))
            at, algorithm = ends[-1], Algorithm(number)
            if at > len(block) or len(value) != algorithm.size:
                raise ValueError("it ends early, or has another size than its algorithm's")
            by, to = (check_name("name", each.decode("ascii")) for each in (signer, audience))
            signatures.append(Signature(by, to, issued_s, expires_s, value, algorithm))
    except (struct.error, ValueError) as exc:
        raise CorruptError("signatures", f"one cannot be read ({exc})") from None
    if len(signatures) > MAX_SIGNATURES:
        raise CorruptError("signatures", f"are more than {MAX_SIGNATURES}")
    return signatures


# -- keys


@runtime_checkable
class Signer(Protocol):
    """A signer: a local key, or a key in a service, which may be slow or fail.

    It signs with Ed25519 unless it has an attribute ``algorithm``, an :class:`Algorithm`.
    """

    @property
    def name(self) -> str: ...

    def sign(self, message: bytes) -> bytes:
        """Return the signature over ``message``, with the size of the algorithm."""
        ...


@dataclass(frozen=True)
class _Key:
    name: str
    _bytes: bytes = field(repr=False)
    algorithm: Algorithm = Algorithm.ED25519


class VerifyKey(_Key):
    """Verifies signatures of one signer; a shared secret can make them too."""

    @classmethod
    def parse(cls, text: str) -> VerifyKey:
        """Read a public key, or a shared secret; messages never repeat a possible secret."""
        fix = "give the public key that keygen printed, never the secret key"
        return cls(*_parse("trusted key", text, _KEY_BYTES, fix))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the name of the key in revocation lists: 32 hexadecimal digits."""
        return hashlib.sha256(bytes([self.algorithm]) + self._bytes).hexdigest()[:32]

    def proves(self, signature: Signature, digest: bytes) -> bool:
        """Return whether ``signature`` was made with this key for the entry with ``digest``."""
        value, message = signature.value, signature.over(digest)
        named = signature.signer, signature.algorithm, len(value)
        if named != (self.name, self.algorithm, self.algorithm.size):
            return False
        if self.algorithm is Algorithm.HMAC_SHA256:
            return hmac.compare_digest(hmac.digest(self._bytes, message, "sha256"), value)
        return _is_signed(self._bytes, value, message)


class SigningKey(_Key):
    """A key in this process that signs: the seed of a pair, or a shared secret."""

    @classmethod
    def parse(cls, text: str) -> SigningKey:
        """Read a secret key, or a shared secret; messages never repeat it."""
        fix = "give the secret key that keygen wrote"
        name, key, algorithm = _parse("signing key", text, 2 * _KEY_BYTES, fix)
        if algorithm is Algorithm.HMAC_SHA256:
            return cls(name, key, algorithm)
        signer = cls(name, key[:_KEY_BYTES])
        if signer._pair[0] != key[_KEY_BYTES:]:
            raise ConfigError(f"signing key {name!r}", "holds two keys that are not a pair", fix)
        return signer

    def sign(self, message: bytes) -> bytes:
        if self.algorithm is Algorithm.HMAC_SHA256:
            return hmac.digest(self._bytes, message, "sha256")
        from nacl.bindings import crypto_sign

        return crypto_sign(message, self._pair[1])[: self.algorithm.size]

    def secret_text(self) -> str:
        """Return the key as text for a file that only its owner can read."""
        kind = f"{_HMAC}:" if self.algorithm is Algorithm.HMAC_SHA256 else ""
        return f"{self.name}:{kind}{base64.b64encode(self._pair[1]).decode()}"

    def public_text(self) -> str:
        """Return the key for readers: the public key, or the shared secret itself."""
        if self.algorithm is Algorithm.HMAC_SHA256:
            return self.secret_text()
        return f"{self.name}:{base64.b64encode(self._pair[0]).decode()}"

    @functools.cached_property
    def _pair(self) -> tuple[bytes, bytes]:
        """Return the bytes for verifying and for signing; a shared secret does both."""
        if self.algorithm is Algorithm.HMAC_SHA256:
            return self._bytes, self._bytes
        from nacl.bindings import crypto_sign_seed_keypair

        return crypto_sign_seed_keypair(self._bytes)


class TimeLimitedSigner:
    """Waits at most ``timeout_s`` for a user's ``signer``; any thread may use it.

    A late signer is not called for half a minute. A call that never returns occupies a thread, and
    the end of the program does not wait for it. Raises ConfigError for an illegal name or
    algorithm.
    """

    def __init__(self, signer: Signer, timeout_s: float) -> None:
        self.name = check_name("signer's name", signer.name)
        self.algorithm = _algorithm_of(signer)
        self._signer = signer
        self._executor = DeadlineExecutor(f"signer {self.name!r}")
        self._executor.limit_s = timeout_s

    def sign(self, message: bytes) -> bytes:
        """Return the signature, or raise UntrustedError if the signer is late or fails."""
        try:
            answer: object = self._executor.call(lambda: self._signer.sign(message))
            if isinstance(answer, bytes) and len(answer) == self.algorithm.size:
                return answer
            raise ValueError(f"it did not return {self.algorithm.size} bytes")
        except TransientError as exc:
            raise UntrustedError("unsigned", str(exc)) from None
        except Exception as exc:  # of any library
            raise UntrustedError("unsigned", f"signer {self.name!r} failed ({exc!r})") from exc


def generate(name: str, algorithm: Algorithm = Algorithm.ED25519) -> SigningKey:
    """Make a new key."""
    return SigningKey(check_name("key name", name), os.urandom(_KEY_BYTES), algorithm)


def sign(digest: bytes, signer: Signer, *, audience: str, issued_s: int, ttl_s: int) -> Signature:
    """Return the signature of ``signer`` for the entry; with a ``ttl_s`` of 0 it never expires."""
    expires_s, algorithm = issued_s + ttl_s if ttl_s else 0, _algorithm_of(signer)
    unsigned = Signature(signer.name, audience, issued_s, expires_s, algorithm=algorithm)
    return replace(unsigned, value=signer.sign(unsigned.over(digest)))


def _algorithm_of(signer: Signer) -> Algorithm:
    named = getattr(signer, "algorithm", Algorithm.ED25519)
    if named not in Algorithm.__members__.values():
        fix = "give it one of s3cache.trust.Algorithm"
        raise ConfigError(f"signer {signer.name!r}", f"has algorithm {named!r}", fix)
    return Algorithm(named)


def _parse(thing: str, text: str, size: int, fix: str) -> tuple[str, bytes, Algorithm]:
    """Parse a key; ``size`` is the size of an Ed25519 key."""
    name, _, encoded = text.strip().partition(":")
    check_name(f"{thing}: name", name)
    algorithm = Algorithm.ED25519
    if encoded.startswith(f"{_HMAC}:"):
        algorithm, encoded = Algorithm.HMAC_SHA256, encoded.partition(":")[2]
    shown = thing if may_be_a_key(name) else f"{thing} {name!r}"
    try:
        key = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise ConfigError(shown, "is not base64 after its name", fix) from None
    if algorithm is Algorithm.HMAC_SHA256:
        if len(key) < _KEY_BYTES:
            fix = "copy the file that keygen --shared wrote"
            raise ConfigError(shown, f"has {len(key)} bytes instead of {_KEY_BYTES} or more", fix)
    elif len(key) != size:
        raise ConfigError(shown, f"has {len(key)} bytes instead of {size}", fix)
    return name, key, algorithm


# A process often verifies an entry twice: at the download and at the lookup.
@functools.lru_cache(maxsize=4096)
def _is_signed(public: bytes, value: bytes, message: bytes) -> bool:
    from nacl.bindings import crypto_sign_open
    from nacl.exceptions import BadSignatureError

    try:
        crypto_sign_open(value + message, public)
    except BadSignatureError:
        return False
    return True


# -- the policy

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
_MAX_KEY_BYTES: Final = 4096  # of a key file


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
        words = [self.level, *sorted(keys), *sorted(self.revoked_keys), *sorted(digests)]
        return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]

    def check(self, digest: bytes, block: bytes) -> Signature | None:
        """Return the signature that makes an entry trusted; ``None`` if none is required.

        Raises UntrustedError if the entry may not be used. Only its digest and the block of its
        signatures are known; the rest was not parsed.
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
            if (problem := self._problem(signature, digest)) is None:
                return signature
            problems[problem] = f"signed by {signature.signer!r} for {signature.audience!r}"
        cause = max(problems, key=get_args(Cause).index)
        if self.level == "prefer" and cause in ("unsigned", "unknown-key"):
            return None
        raise UntrustedError(cause, problems[cause])

    def _problem(self, signature: Signature, digest: bytes) -> Cause | None:
        """Return the problem with a signature, or None."""
        named = [trusted for trusted in self.trusted if trusted.key.name == signature.signer]
        if not named:
            return "unknown-key"
        proving = [trusted for trusted in named if trusted.key.proves(signature, digest)]
        if not proving:
            return "bad-signature"
        valid = [trusted for trusted in proving if trusted.key.fingerprint not in self.revoked_keys]
        if not valid:
            return "revoked"
        if all(trusted.audience != signature.audience for trusted in valid):
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

    A ``level`` of ``None`` is ``require`` if any key is trusted, and else ``off``. Raises
    ConfigError if one of them cannot be used, or no entry could ever be used.
    """
    check_name("option audience", audience)
    machine = _read_machine_file(machine_file)
    least: TrustMode | None = machine.get("trust")
    if machine_keys := " ".join(machine.get("trusted_keys", ())):
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
        fix = "let all users read it"
        raise ConfigError(thing, f"cannot be opened ({exc.strerror})", fix) from None
    if about.st_uid != 0 or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        fix = f"chown root {path}; chmod 644 {path}"
        raise ConfigError(thing, "is writable by users other than root", fix)
    try:
        content: dict[str, Any] = {**json.loads(text)}
        lists = [content.get(name, []) for name in ("trusted_keys", "revoked")]
        if (
            content.keys() <= {"trust", "trusted_keys", "revoked"}
            and content.get("trust") in (None, *get_args(TrustMode))
            and all(isinstance(words, list) for words in lists)
            and all(isinstance(word, str) for words in lists for word in words)
        ):
            return content
    except (TypeError, ValueError):
        pass
    fix = 'write {"trust": "off|prefer|require", "trusted_keys": [...], "revoked": [...]}'
    raise ConfigError(thing, "has other content", fix)


def signing_key_of(text: str) -> SigningKey | None:
    """Return the key of a setting: the path of a file, or the key itself, like a CI secret."""
    if ":" in text and not text.startswith(("/", ".", "~")):
        return SigningKey.parse(text)
    return read_secret(os.path.expanduser(text)) if text else None


def read_secret(path: str) -> SigningKey:
    """Read the signing key in a file that others can neither read nor write.

    Its group may read it: secrets are mounted in this way for programs that are not root.
    """
    shown = "" if may_be_a_key(path) else f" {path}"  # a secret may be in place of a path
    thing = f"signing key file{shown}"
    try:
        about, data = _read_file(path, _MAX_KEY_BYTES + 1)
    except OSError as exc:
        raise ConfigError(thing, f"cannot be opened ({exc.strerror})", "give another") from None
    if about.st_uid not in (os.geteuid(), 0):
        raise ConfigError(thing, f"belongs to user {about.st_uid}", "own it yourself")
    if stat.S_ISREG(about.st_mode) and about.st_mode & 0o027:
        mode = f"has mode {stat.S_IMODE(about.st_mode):04o}"
        raise ConfigError(thing, mode, f"chmod 600{shown or ' it'}")
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
