r"""Signatures of an entry, as they lie in a frame, and the keys that make and verify them.

::

    block      = signature*                    at most 16, nothing between or behind them
    signature  = statement value
    statement  =  0  algorithm       u8        1 Ed25519 (RFC 8032), 2 HMAC-SHA256 (RFC 2104)
                  1  signer_size     u8
                  2  audience_size   u8
                  3  value_size      u8
                  4  issued_s        u64       Unix time in seconds
                 12  expires_s       u64       when it becomes void; 0 for never
                 20  signer, audience          names
    value      = the signature, over  "s3cache entry signature 1" 00 digest statement

Integers are big-endian. The digest is that of the frame (:mod:`s3cache.frame`), which stands for
its version, header and sections, so for its key and variant. The statement begins with its own
sizes: no two of them make the same bytes. It names the audience because a key may sign for one
purpose and not for another: a signature for ``pulls`` is void in ``main``.

Ed25519 keys are written as Nix writes those of its binary caches, and either makes them
(https://nix.dev/manual/nix/latest/command-ref/new-cli/nix3-key-generate-secret)::

    public   name:base64(32 bytes)
    secret   name:base64(seed, 32 bytes, and public key, 32 bytes)

A shared secret is ``name:hmac-sha256:base64(32 bytes or more)`` for both.

Ed25519 is libsodium's, through PyNaCl, which is imported where such a key is first used. It takes
half as long as OpenSSL's, lets other threads run meanwhile, and refuses what only forgers make:
numbers that are not reduced, keys and points of small order, keys in another form than RFC 8032's
(https://doc.libsodium.org/public-key_cryptography/public-key_signatures).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Final, Protocol, runtime_checkable

from s3cache.errors import (
    CircuitOpenError,
    ConfigError,
    CorruptError,
    TransientError,
    UntrustedError,
)
from s3cache.util.text import may_be_a_key
from s3cache.util.threads import Breaker, DeadlineExecutor

MAX_SIGNATURES: Final = 16

_DOMAIN: Final = b"s3cache entry signature 1\x00"
_FIELDS: Final = struct.Struct(">BBBBQQ")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}")
_HMAC: Final = "hmac-sha256"
_KEY_BYTES: Final = 32
# So that not every one of the next graphs waits for a signer that was late once.
_REST_S: Final = 60.0


class Algorithm(IntEnum):
    """How a signature is made; a key is for one of them and no other."""

    ED25519 = 1
    HMAC_SHA256 = 2

    @property
    def size(self) -> int:
        """Bytes of each signature."""
        return 64 if self is Algorithm.ED25519 else 32


@dataclass(frozen=True, slots=True)
class Statement:
    """What a signer says about an entry."""

    algorithm: Algorithm
    signer: str  # the name of its key
    audience: str  # the purpose that it is signed for
    issued_s: int  # Unix time in seconds
    expires_s: int = 0  # Unix time in seconds; 0 for never

    def over(self, digest: bytes) -> bytes:
        """Return the bytes that are signed."""
        return _DOMAIN + digest + self.packed()

    def packed(self) -> bytes:
        signer, audience = self.signer.encode(), self.audience.encode()
        sizes = len(signer), len(audience), self.algorithm.size
        fields = _FIELDS.pack(self.algorithm, *sizes, self.issued_s, self.expires_s)
        return fields + signer + audience


@dataclass(frozen=True, slots=True)
class Signature:
    """A statement and the signature over it."""

    statement: Statement
    value: bytes


def check_name(thing: str, name: str) -> str:
    """Return ``name``, or raise :class:`ConfigError` if no signer or audience can bear it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            thing if may_be_a_key(name) else f"{thing} {name[:80]!r}",
            "is not 1 to 128 of A-Z a-z 0-9 . _ / @ + - that begin with a letter or digit",
            "use a name such as ci-main-1",
        )
    return name


def pack(signatures: Iterable[Signature]) -> bytes:
    """Return the block that holds the signatures, in their order."""
    packed = [each.statement.packed() + each.value for each in signatures]
    if len(packed) > MAX_SIGNATURES:
        raise ConfigError(
            "signatures", f"are {len(packed)}, more than {MAX_SIGNATURES}", "sign with fewer keys"
        )
    return b"".join(packed)


def unpack(block: bytes) -> list[Signature]:
    """Return what :func:`pack` was given, or raise :class:`CorruptError`. None is verified yet."""
    found: list[Signature] = []
    at = 0
    try:
        while at < len(block):
            number, *sizes, issued_s, expires_s = _FIELDS.unpack_from(block, at)
            ends = [*accumulate(sizes, initial=at + _FIELDS.size)]
            signer, audience, value = (block[start:end] for start, end in pairwise(ends))
            at = ends[-1]
            algorithm = Algorithm(number)
            if at > len(block) or len(value) != algorithm.size:
                raise ValueError("it ends early, or has another size than its algorithm's")
            who, whom = (check_name("name", name.decode("ascii")) for name in (signer, audience))
            found.append(Signature(Statement(algorithm, who, whom, issued_s, expires_s), value))
    except (struct.error, ValueError) as exc:
        raise CorruptError("signatures", f"one cannot be read ({exc})") from None
    if len(found) > MAX_SIGNATURES:
        raise CorruptError("signatures", f"are more than {MAX_SIGNATURES}")
    return found


# -- keys


@runtime_checkable
class Signer(Protocol):
    """Signs: a key that is here, or one that a service keeps, which may take long and may fail."""

    @property
    def name(self) -> str: ...

    @property
    def algorithm(self) -> Algorithm: ...

    def sign(self, message: bytes) -> bytes:
        """Return the signature over ``message``, as long as the algorithm's are."""
        ...


@dataclass(frozen=True)
class _Key:
    name: str
    algorithm: Algorithm
    _bytes: bytes = field(repr=False)


class VerifyKey(_Key):
    """Verifies signatures of one signer; a shared secret can make them too."""

    @classmethod
    def parse(cls, text: str) -> VerifyKey:
        """Read a public key, or a shared secret; no message repeats what may be secret."""
        name, algorithm, key = _parse("trusted key", text, _KEY_BYTES, 2 * _KEY_BYTES)
        if algorithm is Algorithm.ED25519 and len(key) == 2 * _KEY_BYTES:
            raise ConfigError(
                f"trusted key {name!r}",
                "is a secret one, which readers must not have",
                "give the public key that was printed with it",
            )
        return cls(name, algorithm, key)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the name of the key in revocation lists: 32 hexadecimal digits."""
        return hashlib.sha256(bytes([self.algorithm]) + self._bytes).hexdigest()[:32]

    def proves(self, signature: Signature, digest: bytes) -> bool:
        """Return whether ``signature`` was made with this key for the entry with that digest."""
        statement = signature.statement
        if (statement.algorithm, statement.signer) != (self.algorithm, self.name):
            return False
        if len(signature.value) != self.algorithm.size:
            return False
        message = statement.over(digest)
        if self.algorithm is Algorithm.HMAC_SHA256:
            made = hmac.digest(self._bytes, message, "sha256")
            return hmac.compare_digest(made, signature.value)
        return _is_signed(self._bytes, signature.value, message)


class SigningKey(_Key):
    """A key in this process that signs."""

    @classmethod
    def parse(cls, text: str) -> SigningKey:
        """Read a secret key, or a shared secret; no message repeats what is secret."""
        name, algorithm, key = _parse("signing key", text, 2 * _KEY_BYTES, _KEY_BYTES)
        if algorithm is Algorithm.HMAC_SHA256:
            return cls(name, algorithm, key)
        thing = f"signing key {name!r}"
        if len(key) == _KEY_BYTES:
            raise ConfigError(thing, "is a public one", "give the secret key that belongs to it")
        found = cls(name, algorithm, key[:_KEY_BYTES])
        if found._public_bytes != key[_KEY_BYTES:]:
            raise ConfigError(thing, "holds two keys that are no pair", "make a new one")
        return found

    def sign(self, message: bytes) -> bytes:
        if self.algorithm is Algorithm.HMAC_SHA256:
            return hmac.digest(self._bytes, message, "sha256")
        from nacl.bindings import crypto_sign, crypto_sign_BYTES

        return crypto_sign(message, self._bytes + self._public_bytes)[:crypto_sign_BYTES]

    def secret_text(self) -> str:
        """Return the key as it is written into a file that only its owner reads."""
        if self.algorithm is Algorithm.HMAC_SHA256:
            return f"{self.name}:{_HMAC}:{_base64(self._bytes)}"
        return f"{self.name}:{_base64(self._bytes + self._public_bytes)}"

    def public_text(self) -> str:
        """Return what readers need: the public key, or the shared secret itself."""
        if self.algorithm is Algorithm.HMAC_SHA256:
            return self.secret_text()
        return f"{self.name}:{_base64(self._public_bytes)}"

    @functools.cached_property
    def _public_bytes(self) -> bytes:
        from nacl.bindings import crypto_sign_seed_keypair

        return crypto_sign_seed_keypair(self._bytes)[0]


class TimeLimitedSigner:
    """Waits for a ``signer`` of the user's own no longer than ``timeout_s``; any thread may use it.

    A signer that is late or fails is left alone for a minute. A call that never returns holds a
    thread, and the end of the program does not wait for it.

    Raises:
        ConfigError: it has no name or algorithm that a signature could bear.
    """

    def __init__(self, signer: Signer, timeout_s: float, *, rest_s: float = _REST_S) -> None:
        self.name = check_name("signer's name", signer.name)
        if signer.algorithm not in Algorithm.__members__.values():
            raise ConfigError(
                f"signer {self.name!r}",
                f"has algorithm {signer.algorithm!r}",
                "give it one of s3cache.trust.Algorithm",
            )
        self.algorithm = Algorithm(signer.algorithm)
        self._signer = signer
        self._executor = DeadlineExecutor(f"signer {self.name!r}")
        self._executor.limit_s = timeout_s
        self._breaker = Breaker(1, rest_s)

    def sign(self, message: bytes) -> bytes:
        """Return the signature over ``message``.

        Raises:
            UntrustedError: there is none: it took too long, failed, or is no signature.
        """
        is_probe, has_signed = False, False
        try:
            is_probe = self._breaker.enter()
            answer: object = self._executor.call(lambda: self._signer.sign(message))
            if not isinstance(answer, bytes) or len(answer) != self.algorithm.size:
                raise ValueError(f"it gave no {self.algorithm.size} bytes")
            has_signed = True
            return answer
        except CircuitOpenError:
            raise self._failed("is skipped, as it was late or failed just now") from None
        except TransientError as exc:
            raise UntrustedError("unsigned", str(exc)) from None
        except Exception as exc:  # of any library
            raise self._failed(f"failed ({exc!r})") from exc
        finally:
            if has_signed:
                self._breaker.succeed(is_probe)
            else:
                self._breaker.fail(is_probe)

    def _failed(self, how: str) -> UntrustedError:
        return UntrustedError("unsigned", f"signer {self.name!r} {how}")


def generate(name: str, algorithm: Algorithm = Algorithm.ED25519) -> SigningKey:
    """Return a new key."""
    return SigningKey(check_name("key name", name), algorithm, os.urandom(_KEY_BYTES))


def sign(digest: bytes, signer: Signer, *, audience: str, issued_s: int, ttl_s: int) -> Signature:
    """Return the signature of ``signer`` for the entry; a ``ttl_s`` of 0 is for ever."""
    expires_s = issued_s + ttl_s if ttl_s else 0
    statement = Statement(signer.algorithm, signer.name, audience, issued_s, expires_s)
    return Signature(statement, signer.sign(statement.over(digest)))


def _parse(thing: str, text: str, *sizes: int) -> tuple[str, Algorithm, bytes]:
    """Read a key; ``sizes`` are those an Ed25519 key may have, the right one first."""
    name, _, rest = text.strip().partition(":")
    check_name(f"{thing}: name", name)
    algorithm = Algorithm.ED25519
    if rest.startswith(f"{_HMAC}:"):
        algorithm, rest = Algorithm.HMAC_SHA256, rest.partition(":")[2]
    shown, fix = (
        thing if may_be_a_key(name) else f"{thing} {name!r}",
        "copy it as keygen printed it",
    )
    try:
        key = base64.b64decode(rest, validate=True)
    except ValueError:
        raise ConfigError(shown, "is not base64 behind its name", fix) from None
    is_right, wanted = len(key) in sizes, f"{sizes[0]}"
    if algorithm is Algorithm.HMAC_SHA256:
        is_right, wanted = len(key) >= _KEY_BYTES, f"{_KEY_BYTES} or more"
    if not is_right:
        raise ConfigError(shown, f"has {len(key)} bytes, and not {wanted}", fix)
    return name, algorithm, key


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


# A verified signature stays valid, and an entry is often verified twice in a process: when it is
# downloaded and when it is looked up. Expiry and revocation are checked elsewhere.
@functools.lru_cache(maxsize=4096)
def _is_signed(public: bytes, value: bytes, message: bytes) -> bool:
    from nacl.bindings import crypto_sign_open
    from nacl.exceptions import BadSignatureError

    try:
        crypto_sign_open(value + message, public)
    except BadSignatureError:
        return False
    return True
