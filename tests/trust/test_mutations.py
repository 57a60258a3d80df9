"""Signed frames, changed at random: none of them is accepted.

More of them: ``S3CACHE_TEST_MUTATIONS=1000000 make test ARGS="-k mutations"``.
"""

from __future__ import annotations

import os
import random

import pytest

from s3cache import frame
from s3cache.errors import CorruptError, UntrustedError
from s3cache.trust import Algorithm, Policy, Trusted, VerifyKey, generate, pack, sign
from tests.support.frames import small_frame

COUNT = int(os.environ.get("S3CACHE_TEST_MUTATIONS", "3000"))

pytestmark = pytest.mark.timeout(60 + COUNT / 500)


def mutated(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """``data`` with one to three changes of those that damage and forgers make."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        # Most of them where they are read first.
        size = len(changed) if chance.random() < 0.3 else min(len(changed), 400)
        at, end = chance.randrange(size), chance.randrange(size)
        match chance.randrange(6):
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
                other = chance.choice(others)
                changed[at:end] = other[at:end]
        if len(changed) < 100:
            break
    return bytes(changed)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_no_mutation_is_accepted(algorithm: Algorithm) -> None:
    key, stranger = generate("ci", algorithm), generate("ci", algorithm)
    trusted = (Trusted("main", VerifyKey.parse(key.public_text())),)
    judge = Policy("require", trusted, now=lambda: 100).judge

    def signed(data: bytes, by: object = key, audience: str = "main", ttl_s: int = 0) -> bytes:
        return frame.signed(
            frame.decode(data),
            lambda digest: pack([sign(digest, by, audience=audience, issued_s=50, ttl_s=ttl_s)]),  # type: ignore[arg-type]
        )

    plain = small_frame()
    another = frame.encode(kind="test", key="k2", sections={"text": b"no"}, created_ns=1)
    good = {signed(plain), signed(another)}
    others = [*good, plain, another, signed(another, stranger), signed(another, audience="pulls")]
    others += [signed(plain, ttl_s=50)]
    chance = random.Random(f"{algorithm} {COUNT}")
    accepted = refused = 0
    for _ in range(COUNT):
        data = mutated(chance.choice(others), others, chance)
        try:
            frame.decode(data, admit=judge).verify()
        except (CorruptError, UntrustedError):
            refused += 1
            continue
        accepted += data not in good
    assert accepted == 0
    assert refused > COUNT * 0.9
