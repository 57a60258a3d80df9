"""Keys that sign entries and keys that verify signatures, and how they are written down.

Ed25519 keys are written as Nix writes those of its binary caches, and either makes them
(https://nix.dev/manual/nix/latest/command-ref/new-cli/nix3-key-generate-secret)::

    public   name:base64(32 bytes)
    secret   name:base64(seed, 32 bytes, and public key, 32 bytes)

A shared secret is ``name:hmac-sha256:base64(32 bytes or more)``
for both.

Ed25519 is libsodium's, through PyNaCl, which is imported where such a key is first used. It takes
half as long as OpenSSL's, lets other threads run meanwhile, and refuses what only forgers make:
numbers that are not reduced, keys and points of small order, keys in another form than RFC 8032's
(https://doc.libsodium.org/public-key_cryptography/public-key_signatures).
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import os
import stat
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from s3cache.errors import ConfigError
from s3cache.trust._signatures import Algorithm, Signature, Statement, check_name
from s3cache.util.words import may_be_a_key

__all__ = ["Signer", "SigningKey", "VerifyKey", "generate", "read_file", "read_secret", "sign"]

_HMAC: Final = "hmac-sha256"
_KEY_BYTES: Final = 32
# A key file is no larger: what is, is another file.
_MAX_FILE_BYTES: Final = 4096


@runtime_checkable
class Signer(Protocol):
    """Signs: a key that is here, or one that a service keeps.

    ``sign`` may take long and may fail, see :class:`~s3cache.trust.TimeLimitedSigner`.
    """

    @property
    def name(self) -> str: ...

    @property
    def algorithm(self) -> Algorithm: ...

    def sign(self, message: bytes) -> bytes:
        """Return the signature over ``message``, as long as the algorithm's are."""
        ...


@dataclass(frozen=True)
class VerifyKey:
    """Verifies signatures of one signer; a shared secret can make them too.

    Attributes:
        text: as it is written down.
    """

    name: str
    algorithm: Algorithm
    text: str = field(repr=False)
    _bytes: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> VerifyKey:
        """Read a public key, or a shared secret.

        Raises:
            ConfigError: it is no such key. The message does not repeat what may be secret.
        """
        name, algorithm, key = _parse("trusted key", text)
        if algorithm is Algorithm.ED25519 and len(key) == 2 * _KEY_BYTES:
            raise ConfigError(
                f"trusted key {name!r}",
                "is a secret one, which readers must not have",
                "give the public key that was printed with it",
            )
        if algorithm is Algorithm.ED25519 and len(key) != _KEY_BYTES:
            raise _wrong_size(f"trusted key {name!r}", len(key), "32")
        return cls(name, algorithm, text.strip(), key)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the name of the key in revocation lists: 32 hexadecimal digits."""
        return hashlib.sha256(bytes([self.algorithm]) + self._bytes).hexdigest()[:32]

    def proves(self, signature: Signature, digest: bytes) -> bool:
        """Return whether ``signature`` was made with this key for the entry with that digest."""
        statement = signature.statement
        if statement.algorithm is not self.algorithm or statement.signer != self.name:
            return False
        if len(signature.value) != self.algorithm.size:
            return False
        message = statement.over(digest)
        if self.algorithm is Algorithm.HMAC_SHA256:
            return hmac.compare_digest(_mac(self._bytes, message), signature.value)
        return _is_signed(self._bytes, signature.value, message)


@dataclass(frozen=True)
class SigningKey:
    """A key in this process that signs."""

    name: str
    algorithm: Algorithm
    _bytes: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> SigningKey:
        """Read a secret key, or a shared secret.

        Raises:
            ConfigError: it is no such key. The message does not repeat what is secret.
        """
        name, algorithm, key = _parse("signing key", text)
        if algorithm is Algorithm.HMAC_SHA256:
            return cls(name, algorithm, key)
        if len(key) == _KEY_BYTES:
            raise ConfigError(
                f"signing key {name!r}", "is a public one", "give the secret key that belongs to it"
            )
        if len(key) != 2 * _KEY_BYTES:
            raise _wrong_size(f"signing key {name!r}", len(key), "64")
        found = cls(name, algorithm, key[:_KEY_BYTES])
        if found._public_bytes != key[_KEY_BYTES:]:
            raise ConfigError(
                f"signing key {name!r}", "holds two keys that are no pair", "make a new one"
            )
        return found

    def sign(self, message: bytes) -> bytes:
        if self.algorithm is Algorithm.HMAC_SHA256:
            return _mac(self._bytes, message)
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


def generate(name: str, algorithm: Algorithm = Algorithm.ED25519) -> SigningKey:
    """Return a new key."""
    return SigningKey(check_name("key name", name), algorithm, os.urandom(_KEY_BYTES))


def sign(digest: bytes, signer: Signer, *, audience: str, issued_s: int, ttl_s: int) -> Signature:
    """Return the signature of ``signer`` for the entry with that digest.

    Args:
        ttl_s: seconds until it expires; 0 for never.
    """
    expires_s = issued_s + ttl_s if ttl_s else 0
    statement = Statement(signer.algorithm, signer.name, audience, issued_s, expires_s)
    return Signature(statement, signer.sign(statement.over(digest)))


def read_secret(path: str) -> SigningKey:
    """Read the signing key in a file that others neither read nor write.

    Its group may read it: that is how secrets are mounted where programs are not root.

    Raises:
        ConfigError: there is none, or others may read or write it.
    """
    thing, fix = f"signing key file {path}", f"chmod 600 {path}"
    if may_be_a_key(path):  # a secret in place of a file's name
        thing, fix = "signing key file", "chmod 600 it"
    try:
        about, data = read_file(path, _MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(thing, f"cannot be opened ({exc.strerror})", "name one") from None
    if about.st_uid not in (os.geteuid(), 0):
        raise ConfigError(thing, f"belongs to user {about.st_uid}", "own it yourself")
    if stat.S_ISREG(about.st_mode) and about.st_mode & 0o027:
        raise ConfigError(thing, f"has mode {stat.S_IMODE(about.st_mode):04o}", fix)
    problem = ""
    if not stat.S_ISREG(about.st_mode):
        problem = "is no file"
    elif len(data) > _MAX_FILE_BYTES:
        problem = "is too large to be one"
    elif not data.isascii():
        problem = "holds no key"
    if problem:
        raise ConfigError(thing, problem, "name the file that keygen wrote")
    return SigningKey.parse(data.decode("ascii"))


def read_file(path: str, at_most: int) -> tuple[os.stat_result, bytes]:
    """Return the status of a file and its first bytes, none if it is not a regular file.

    Raises:
        OSError: it cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(fd)
        return about, os.read(fd, at_most) if stat.S_ISREG(about.st_mode) else b""
    finally:
        os.close(fd)


def _parse(thing: str, text: str) -> tuple[str, Algorithm, bytes]:
    name, _, rest = text.strip().partition(":")
    check_name(f"{thing}: name", name)
    shown = thing if may_be_a_key(name) else f"{thing} {name!r}"
    algorithm = Algorithm.ED25519
    if rest.startswith(f"{_HMAC}:"):
        algorithm, rest = Algorithm.HMAC_SHA256, rest.partition(":")[2]
    try:
        key = base64.b64decode(rest, validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(
            shown, "is not base64 behind its name", "copy it as keygen printed it"
        ) from None
    if algorithm is Algorithm.HMAC_SHA256 and len(key) < _KEY_BYTES:
        raise _wrong_size(shown, len(key), "32 or more")
    return name, algorithm, key


def _wrong_size(thing: str, size: int, wanted: str) -> ConfigError:
    return ConfigError(thing, f"has {size} bytes, and not {wanted}", "copy it as keygen printed it")


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


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
