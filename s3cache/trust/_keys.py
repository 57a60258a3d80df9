r"""Signatures of an entry, as they lie in a frame, and the keys that make and verify them.

::

    block      = signature*                    at most 16, nothing between or behind them
    signature  = statement value
    statement  =  0  signer_size     u8
                  1  audience_size   u8
                  2  issued_s        u64       Unix time in seconds
                 10  expires_s       u64       when it becomes void; 0 for never
                 18  signer, audience          names
    value      = 64 bytes, Ed25519 (RFC 8032) over  "s3cache entry signature 1" 00 digest statement

Integers are big-endian. The digest is that of the frame (:mod:`s3cache.frame`), which stands for
its version, header and sections, so for its key and variant. The statement begins with its own
sizes: no two of them make the same bytes. It names the audience because a key may sign for one
purpose and not for another: a signature for ``pulls`` is void in ``main``.

Keys are written as Nix writes those of its binary caches, and either makes them
(https://nix.dev/manual/nix/latest/command-ref/new-cli/nix3-key-generate-secret)::

    public   name:base64(32 bytes)
    secret   name:base64(seed, 32 bytes, and public key, 32 bytes)

Ed25519 is libsodium's, through PyNaCl, which is imported where a key is first used. It takes
half as long as OpenSSL's, lets other threads run meanwhile, and refuses what only forgers make:
numbers that are not reduced, keys and points of small order, keys in another form than RFC 8032's
(https://doc.libsodium.org/public-key_cryptography/public-key_signatures).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, runtime_checkable

from s3cache.errors import ConfigError, CorruptError, TransientError, UntrustedError
from s3cache.util.text import may_be_a_key
from s3cache.util.threads import DeadlineExecutor

__all__ = [
    "MAX_SIGNATURES",
    "Signature",
    "Signer",
    "SigningKey",
    "TimeLimitedSigner",
    "VerifyKey",
    "generate",
    "pack",
    "sign",
    "unpack",
]

MAX_SIGNATURES: Final = 16

_DOMAIN: Final = b"s3cache entry signature 1\x00"
_FIELDS: Final = struct.Struct(">BBQQ")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}")
_KEY_BYTES: Final = 32
_VALUE_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Signature:
    """What a signer says about an entry, and the value that proves it."""

    signer: str  # the name of its key
    audience: str  # the purpose that it is signed for
    issued_s: int  # Unix time in seconds
    expires_s: int = 0  # Unix time in seconds; 0 for never
    value: bytes = b""

    @property
    def statement(self) -> bytes:
        signer, audience = self.signer.encode(), self.audience.encode()
        sizes = len(signer), len(audience)
        return _FIELDS.pack(*sizes, self.issued_s, self.expires_s) + signer + audience

    def over(self, digest: bytes) -> bytes:
        """Return the bytes that are signed."""
        return _DOMAIN + digest + self.statement


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
    return b"".join(each.statement + each.value for each in signatures)


def unpack(block: bytes) -> list[Signature]:
    """Return what :func:`pack` was given, or raise :class:`CorruptError`. None is verified yet."""
    found: list[Signature] = []
    at = 0
    try:
        while at < len(block):
            signer_size, audience_size, issued_s, expires_s = _FIELDS.unpack_from(block, at)
            signer_at = at + _FIELDS.size
            audience_at = signer_at + signer_size
            value_at = audience_at + audience_size
            at = value_at + _VALUE_BYTES
            if at > len(block):
                raise ValueError("it ends early")
            signer = check_name("name", block[signer_at:audience_at].decode("ascii"))
            audience = check_name("name", block[audience_at:value_at].decode("ascii"))
            found.append(Signature(signer, audience, issued_s, expires_s, block[value_at:at]))
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

    def sign(self, message: bytes) -> bytes:
        """Return the Ed25519 signature over ``message``."""
        ...


@dataclass(frozen=True)
class VerifyKey:
    """Verifies signatures of one signer."""

    name: str
    _bytes: bytes

    @classmethod
    def parse(cls, text: str) -> VerifyKey:
        """Read a public key; no message repeats what may be secret."""
        fix = "give the public key that keygen printed, and never the secret one"
        return cls(*_parse("trusted key", text, _KEY_BYTES, fix))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the name of the key in revocation lists: 32 hexadecimal digits."""
        return hashlib.sha256(self._bytes).hexdigest()[:32]

    def proves(self, signature: Signature, digest: bytes) -> bool:
        """Return whether ``signature`` was made with this key for the entry with that digest."""
        return (
            signature.signer == self.name
            and len(signature.value) == _VALUE_BYTES
            and _is_signed(self._bytes, signature.value, signature.over(digest))
        )


@dataclass(frozen=True)
class SigningKey:
    """A key in this process that signs."""

    name: str
    _seed: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> SigningKey:
        """Read a secret key; no message repeats what is secret."""
        fix = "give the secret key that keygen wrote"
        name, key = _parse("signing key", text, 2 * _KEY_BYTES, fix)
        found = cls(name, key[:_KEY_BYTES])
        if found._pair[0] != key[_KEY_BYTES:]:
            raise ConfigError(f"signing key {name!r}", "holds two keys that are no pair", fix)
        return found

    def sign(self, message: bytes) -> bytes:
        from nacl.bindings import crypto_sign

        return crypto_sign(message, self._pair[1])[:_VALUE_BYTES]

    def secret_text(self) -> str:
        """Return the key as it is written into a file that only its owner reads."""
        return f"{self.name}:{base64.b64encode(self._pair[1]).decode()}"

    def public_text(self) -> str:
        """Return what readers need."""
        return f"{self.name}:{base64.b64encode(self._pair[0]).decode()}"

    @functools.cached_property
    def _pair(self) -> tuple[bytes, bytes]:
        from nacl.bindings import crypto_sign_seed_keypair

        return crypto_sign_seed_keypair(self._seed)


class TimeLimitedSigner:
    """Waits for a ``signer`` of the user's own no longer than ``timeout_s``; any thread may use it.

    One that was late is left alone for half a minute. A call that never returns holds a thread, and
    the end of the program does not wait for it.

    Raises:
        ConfigError: it has no name that a signature could bear.
    """

    def __init__(self, signer: Signer, timeout_s: float) -> None:
        self.name = check_name("signer's name", signer.name)
        self._signer = signer
        self._executor = DeadlineExecutor(f"signer {self.name!r}")
        self._executor.limit_s = timeout_s

    def sign(self, message: bytes) -> bytes:
        """Return the signature over ``message``.

        Raises:
            UntrustedError: there is none: it took too long, failed, or is no signature.
        """
        try:
            answer: object = self._executor.call(lambda: self._signer.sign(message))
            if isinstance(answer, bytes) and len(answer) == _VALUE_BYTES:
                return answer
            raise ValueError(f"it gave no {_VALUE_BYTES} bytes")
        except TransientError as exc:
            raise UntrustedError("unsigned", str(exc)) from None
        except Exception as exc:  # of any library
            problem = f"signer {self.name!r} failed ({exc!r})"
            raise UntrustedError("unsigned", problem) from exc


def generate(name: str) -> SigningKey:
    """Return a new key."""
    return SigningKey(check_name("key name", name), os.urandom(_KEY_BYTES))


def sign(digest: bytes, signer: Signer, *, audience: str, issued_s: int, ttl_s: int) -> Signature:
    """Return the signature of ``signer`` for the entry; a ``ttl_s`` of 0 is for ever."""
    unsigned = Signature(signer.name, audience, issued_s, issued_s + ttl_s if ttl_s else 0)
    return replace(unsigned, value=signer.sign(unsigned.over(digest)))


def _parse(thing: str, text: str, size: int, fix: str) -> tuple[str, bytes]:
    name, _, rest = text.strip().partition(":")
    check_name(f"{thing}: name", name)
    shown = thing if may_be_a_key(name) else f"{thing} {name!r}"
    try:
        key = base64.b64decode(rest, validate=True)
    except ValueError:
        raise ConfigError(shown, "is not base64 behind its name", fix) from None
    if len(key) != size:
        raise ConfigError(shown, f"has {len(key)} bytes, and not {size}", fix)
    return name, key


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
