r"""Signatures of an entry, as they lie in a frame, and what each of them covers.

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
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from s3cache.errors import ConfigError, CorruptError
from s3cache.util.words import may_be_a_key

__all__ = [
    "MAX_SIGNATURES",
    "Algorithm",
    "Signature",
    "Statement",
    "check_name",
    "pack",
    "unpack",
]

MAX_SIGNATURES: Final = 16

_DOMAIN: Final = b"s3cache entry signature 1\x00"
_FIELDS: Final = struct.Struct(">BBBBQQ")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}")


class Algorithm(IntEnum):
    """How a signature is made; a key is for one of them and no other."""

    ED25519 = 1
    HMAC_SHA256 = 2

    @property
    def size(self) -> int:
        """Bytes of each signature."""
        return 64 if self is Algorithm.ED25519 else 32


# For each lookup: an enumeration is slower.
_ALGORITHMS: Final = {int(each): (each, each.size) for each in Algorithm}


@dataclass(frozen=True, slots=True)
class Statement:
    """What a signer says about an entry.

    Attributes:
        signer: the name of its key.
        audience: the purpose that it is signed for.
        issued_s: Unix time in seconds.
        expires_s: Unix time in seconds; 0 for never.
    """

    algorithm: Algorithm
    signer: str
    audience: str
    issued_s: int
    expires_s: int = 0

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
    """Return the name of a signer or an audience.

    Raises:
        ConfigError: it cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            thing if may_be_a_key(name) else f"{thing} {name[:80]!r}",
            "is not 1 to 128 of A-Z a-z 0-9 . _ / @ + - that begin with a letter or digit",
            "use a name such as ci-main-1",
        )
    return name


def pack(signatures: Iterable[Signature]) -> bytes:
    """Return the block that holds the signatures, in their order.

    Raises:
        ConfigError: they are too many.
    """
    packed = [each.statement.packed() + each.value for each in signatures]
    if len(packed) > MAX_SIGNATURES:
        raise ConfigError(
            "signatures", f"are {len(packed)}, more than {MAX_SIGNATURES}", "sign with fewer keys"
        )
    return b"".join(packed)


def unpack(block: bytes) -> list[Signature]:
    """Return what :func:`pack` was given. None is verified yet, so reading them does little.

    Raises:
        CorruptError: this is no such block.
    """
    found: list[Signature] = []
    at = 0
    while at < len(block):
        if len(found) == MAX_SIGNATURES:
            raise CorruptError("signatures", f"are more than {MAX_SIGNATURES}")
        if len(block) - at < _FIELDS.size:
            raise CorruptError("signatures", "end within one")
        algorithm, signer_size, audience_size, size, issued_s, expires_s = _FIELDS.unpack_from(
            block, at
        )
        at += _FIELDS.size
        end = at + signer_size + audience_size + size
        if end > len(block):
            raise CorruptError("signatures", "end within one")
        known, expected = _ALGORITHMS.get(algorithm, (None, None))
        if known is None or size != expected:
            raise CorruptError("signatures", f"one has algorithm {algorithm} and {size} bytes")
        try:
            signer = check_name("signer", block[at : at + signer_size].decode("ascii"))
            at += signer_size
            audience = check_name("audience", block[at : at + audience_size].decode("ascii"))
            at += audience_size
        except (UnicodeDecodeError, ConfigError) as exc:
            raise CorruptError("signatures", f"one bears no name: {exc}") from None
        statement = Statement(known, signer, audience, issued_s, expires_s)
        found.append(Signature(statement, block[at:end]))
        at = end
    return found
