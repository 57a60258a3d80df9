"""Change signed frames as random damage and forgers do, and check what a reader accepts.

Everyone who can write to a bucket can compute digests. So a changed frame is also tried with a
correct digest in the prelude, and with correct digests of the sections too: then only the signature
can reveal the change. Needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgpack  # type: ignore[import-untyped]

from s3cache import frame
from s3cache.errors import CorruptError, UntrustedError
from s3cache.frame import MAGIC, PRELUDE_BYTES, VERSION
from s3cache.trust import (
    Algorithm,
    Policy,
    Signature,
    SigningKey,
    Trusted,
    VerifyKey,
    pack,
    sign,
    unpack,
)

# The fields before the digest, in the grammar at the top of s3cache/frame.py.
_FIELDS = struct.Struct(">8sHHI")
NOW = 1_000_000


def split(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return signatures, header and payload, each truncated where the data end."""
    _, _, signed_size, size = _FIELDS.unpack_from(data)
    start = PRELUDE_BYTES + signed_size
    return data[PRELUDE_BYTES:start], data[start : start + size], data[start + size :]


def resealed(signatures: bytes, header: bytes, payload: bytes) -> bytes:
    """Return a frame of these with the right digest, and at most 64 KiB of signatures."""
    signatures = signatures[:0xFFFF]
    fields = _FIELDS.pack(MAGIC, VERSION, 0, len(header))
    digest = hashlib.sha256(fields + header).digest()
    fields = _FIELDS.pack(MAGIC, VERSION, len(signatures), len(header))
    return fields + digest + signatures + header + payload


def with_section_digests(header: bytes, payload: bytes) -> bytes:
    """Return the header with the right digests of its sections.

    Raises an ``Exception`` of some kind if the header is too damaged.
    """
    fields = msgpack.unpackb(header)
    at = 0
    for record in fields["sections"]:
        end = at + record[2]
        record[4] = hashlib.sha256(payload[at:end]).digest()
        at = end
    return bytes(msgpack.packb(fields))


def signed_by(
    plain: bytes, *keys: SigningKey, audience: str = "main", issued_s: int = 1, ttl_s: int = 0
) -> bytes:
    """Return ``plain`` with a signature of each key."""
    return frame.signed(
        frame.decode(plain),
        lambda digest: pack(
            sign(digest, key, audience=audience, issued_s=issued_s, ttl_s=ttl_s) for key in keys
        ),
    )


def encoded(found: frame.Frame, sections: dict[str, bytes]) -> bytes:
    """Return the frame with other sections and no signature."""
    header = found.header
    return frame.encode(
        kind=header.kind,
        key=header.key,
        variant=header.variant,
        schema=header.schema,
        sections=sections,
        meta=dict(header.meta),
    )


Judge: TypeAlias = Callable[[bytes, bytes], "Signature | None"]


class Reader:
    """A reader that requires signatures, and knows each frame that it may accept.

    Args:
        algorithm: of the keys, which are the same in every process, as a fuzzer's corpus has to be.

    Attributes:
        judge: checks the signatures of a frame; a test may replace it.
        good: frames with one signature, accepted only as they are.
        ample: frames with several signatures; those that prove nothing may change.
        refused: frames without a signature that this reader trusts.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        key, stranger, pulls, stolen = (
            SigningKey(name, bytes([number]) * 32, algorithm)
            for number, name in enumerate(["ci", "ci", "pulls", "stolen"])
        )
        may_sign = [("main", key), ("main", stolen), ("pulls", pulls)]
        trusted = [
            Trusted(audience, VerifyKey.parse(each.public_text())) for audience, each in may_sign
        ]
        self.judge: Judge = Policy(
            "require",
            tuple(trusted),
            revoked_keys=frozenset({trusted[1].key.fingerprint}),
            now=lambda: NOW,
        ).check
        text = b"the same words over and over; " * 20
        plain = [
            frame.encode(
                kind="test",
                key=f"k{number}",
                variant="v" * (number % 2),
                sections={"text": text, "noise": random.Random(number).randbytes(60), "empty": b""},
                meta={"torch": "2.13", "deep": {"list": [1, -2, None, True, 0.5, b"\xff", "ü"]}},
                created_ns=number + 1,
            )
            for number in range(4)
        ]
        self.good = tuple(signed_by(data, key) for data in plain)
        self.ample = tuple(signed_by(data, stranger, key, pulls) for data in plain[:2])
        self.refused = (
            plain[0],
            signed_by(plain[0], stranger),
            signed_by(plain[1], pulls),
            signed_by(plain[1], key, audience="pulls"),
            signed_by(plain[2], key, issued_s=NOW - 100, ttl_s=50),
            signed_by(plain[2], stolen),
        )
        frames = [frame.decode(data) for data in (*self.good, *self.ample)]
        self._contents = {split(bytes(each.data))[1:] for each in frames}
        self._made: set[tuple[bytes, Signature | None]] = {
            (each.digest, signature) for each in frames for signature in unpack(each.signatures)
        }
        for data in (*self.good, *self.ample):
            assert self.admitted(data) is not None
        for data in self.refused:
            assert self.admitted(data) is None

    def admitted(self, data: bytes) -> tuple[bytes, Signature | None] | None:
        """Return the digest and the proving signature of an accepted frame, ``None`` if refused.

        An accepted frame was verified completely.
        """
        proof: list[tuple[bytes, Signature | None]] = []

        def admit(digest: bytes, block: bytes) -> None:
            signature = self.judge(digest, block)
            proof.append((digest, signature))

        try:
            frame.decode(data, admit=admit)
        except (CorruptError, UntrustedError):
            return None
        return proof[0]

    def forgery(self, data: bytes) -> bytes | None:
        """Return ``data``, or ``data`` with right digests, if it is accepted but was never signed.

        An accepted frame must have a header and payload that were signed, and a signature that was
        made for them. Other signatures, which prove nothing, may differ.
        """
        for each in with_right_digests(data):
            proof = self.admitted(each)
            if proof is not None and (
                proof not in self._made or split(each)[1:] not in self._contents
            ):
                return each
        return None


def with_right_digests(data: bytes) -> Iterator[bytes]:
    """Yield the data, and the data with correct digests of the prelude, and of the sections too."""
    yield data
    if len(data) < PRELUDE_BYTES:
        return
    signatures, header, payload = split(data)
    yield resealed(signatures, header, payload)
    with contextlib.suppress(Exception):
        header = with_section_digests(header, payload)
        yield resealed(signatures, header, payload)


class Forgery:
    """Changes frames as damage and forgers do, one to three times each."""

    def __init__(self, frames: tuple[bytes, ...], chance: random.Random) -> None:
        self._frames = frames
        self._chance = chance

    def any(self) -> bytes:
        """Return one of the frames, changed; in rare cases it is as before."""
        return self.changed(self._chance.choice(self._frames))

    def changed(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._chance.choice([1, 1, 1, 2, 3])):
            if len(changed) < 100:
                break
            self._change(changed)
        return bytes(changed)

    def _change(self, changed: bytearray) -> None:
        chance = self._chance
        # Most changes are at the start, which is read first.
        size = len(changed) if chance.random() < 0.3 else min(len(changed), 400)
        at, end = chance.randrange(size), chance.randrange(size)
        match chance.randrange(8):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at] = chance.choice([0, 1, 2, 255])
            case 2:
                del changed[at : at + chance.randrange(1, 40)]
            case 3:
                changed[at:at] = chance.randbytes(chance.randrange(1, 40))
            case 4:
                changed[at : at + 32] = changed[end : end + 32]
            case 5:
                other = chance.choice(self._frames)
                changed[at:end] = other[at:end]
            case 6:  # the header or payload of one, the signatures of another
                mine, theirs = split(bytes(changed)), split(chance.choice(self._frames))
                changed[:] = resealed(
                    *(chance.choice(parts) for parts in zip(mine, theirs, strict=True))
                )
            case 7:  # signatures, moved to where they are not expected
                signatures, header, payload = split(bytes(changed))
                cut = chance.randrange(len(signatures) + 1)
                changed[:] = resealed(signatures[:cut], signatures[cut:] + header, payload)
