"""Attacks by a user who can write to the bucket or to a tier; none of them works.

Each forgery is put where a reader looks: in the bucket and in the local tier. The reader neither
uses it nor stores it locally. Signed frames that are changed at random are not accepted either. For
more mutations: ``S3CACHE_TEST_MUTATIONS=1000000 make test ARGS="-k mutation"``. For a fuzzer that
sees which code they reach: ``tests/fuzz/run.sh``.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from s3cache import entries, frame
from s3cache.cache import Engine, Hit, Saved
from s3cache.errors import UntrustedError
from s3cache.frame import Frame
from s3cache.store import MemoryStore, Store
from s3cache.trust import (
    Algorithm,
    Policy,
    Signature,
    SigningKey,
    Trusted,
    VerifyKey,
    generate,
    pack,
    unpack,
)
from tests.support.caching import KEY, OTHER, entry, open_engine, payload
from tests.support.forging import Forgery, Reader, signed_by
from tests.support.frames import seal
from tests.support.marks import examples
from tests.support.stores import put

MAIN, PULLS = generate("ci-main"), generate("ci-pulls")
SHARED = generate("ci", Algorithm.HMAC_SHA256)
SAME_NAME = generate("ci-main")
NOW = 1_800_000_000
READS: dict[str, Any] = {
    "trusted_keys": f"{MAIN.public_text()} {SHARED.public_text()} pulls={PULLS.public_text()}"
}
EVIL = b"evil" * 70  # as long as the good payload


def signed(found: Frame, key: SigningKey = MAIN, audience: str = "main", **when: int) -> bytes:
    return signed_by(bytes(found.data), key, audience=audience, **when)


def with_signatures(found: Frame, block: bytes) -> bytes:
    return frame.signed(found, lambda _: block)


def confused(found: Frame, algorithm: Algorithm, secret: bytes) -> bytes:
    """Sign with HMAC, with a public key as the secret, and claim ``algorithm``."""
    forger = SigningKey("ci-main", secret, Algorithm.HMAC_SHA256)

    def block(digest: bytes) -> bytes:
        unsigned = Signature("ci-main", "main", 1, algorithm=algorithm)
        value = forger.sign(unsigned.over(digest)).ljust(algorithm.size, b"\0")
        return pack([replace(unsigned, value=value)])

    return frame.signed(found, block)


GOOD = entry(payload=b"good" * 70)
GOOD_SIGNED = signed(GOOD)
PLAIN_EVIL = entry(payload=EVIL)
SIZE = int.from_bytes(GOOD_SIGNED[10:12], "big")
PUBLIC = VerifyKey.parse(MAIN.public_text())
PUBLIC_BYTES = base64.b64decode(MAIN.public_text().partition(":")[2])

FORGERIES: dict[str, tuple[bytes, str]] = {
    "unsigned": (bytes(PLAIN_EVIL.data), "unsigned"),
    "stripped of its signatures": (bytes(entry(payload=b"good" * 70).data), "unsigned"),
    "cut out of its signatures": (
        GOOD_SIGNED[:10] + bytes(2) + GOOD_SIGNED[12:48] + GOOD_SIGNED[48 + SIZE :], "unsigned",
    ),
    "with signatures that the header denies": (
        GOOD_SIGNED[:10] + bytes(2) + GOOD_SIGNED[12:], "corrupt",
    ),
    "claimed to be of another version": (GOOD_SIGNED[:8] + b"\0\2" + GOOD_SIGNED[10:], "corrupt"),
    "signed for another key, put under this one": (signed(entry(OTHER, payload=EVIL)), "corrupt"),
    "with another entry's signature": (
        with_signatures(PLAIN_EVIL, frame.decode(GOOD_SIGNED).signatures), "bad-signature",
    ),
    "with another variant's signature": (
        with_signatures(
            PLAIN_EVIL, frame.decode(signed(entry(variant="w", payload=EVIL))).signatures
        ), "bad-signature",
    ),
    "with mixed sections": (GOOD_SIGNED[: -len(EVIL)] + EVIL, "corrupt"),
    "followed by more": (GOOD_SIGNED + EVIL, "corrupt"),
    "signed for another audience": (signed(PLAIN_EVIL, MAIN, "pulls"), "other-audience"),
    "signed for this audience by a key of another": (signed(PLAIN_EVIL, PULLS), "other-audience"),
    "signed by a stranger with that name": (signed(PLAIN_EVIL, SAME_NAME), "bad-signature"),
    "signed by an unknown key": (signed(PLAIN_EVIL, generate("eve")), "unknown-key"),
    "expired": (signed(PLAIN_EVIL, ttl_s=1), "expired"),
    "signed in the far future": (signed(PLAIN_EVIL, issued_s=1 << 40), "expired"),
    "a MAC by the public key": (
        confused(PLAIN_EVIL, Algorithm.HMAC_SHA256, PUBLIC_BYTES), "bad-signature",
    ),
    "a MAC by the public key, claimed to be Ed25519": (
        confused(PLAIN_EVIL, Algorithm.ED25519, PUBLIC_BYTES), "bad-signature",
    ),
    "a MAC by the text of the public key": (
        confused(PLAIN_EVIL, Algorithm.HMAC_SHA256, MAIN.public_text().encode()), "bad-signature",
    ),
    "an Ed25519 signature under a shared secret's name": (
        signed(PLAIN_EVIL, generate("ci")), "bad-signature",
    ),
    "with a header that harms its parser": (
        seal(b"\xdd\xff\xff\xff\xff", EVIL), "unsigned",  # an older parser would take 32 GiB
    ),
}  # fmt: skip


def placed(store: Store, data: bytes) -> None:
    """Store ``data`` under both names that a reader looks up."""
    for name in entries.names_of(GOOD.header):
        put(store, name, data)


def outcome(engine: Engine) -> tuple[str, set[str]]:
    found = engine.lookup(KEY)
    causes = set(engine.stats().refused)
    engine.close()
    return (found.tier if isinstance(found, Hit) else str(found.reason)), causes


@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_forgery_is_used_or_stored_locally(forgery: str, tmp_path: Path) -> None:
    data, cause = FORGERIES[forgery]
    expected = ("corrupt", set()) if cause == "corrupt" else ("untrusted", {cause})
    store = MemoryStore()
    placed(store, data)
    assert outcome(open_engine(tmp_path, store, **READS)) == expected
    assert not [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    # Without trust, digests alone keep out damaged entries, and nothing else.
    tier, _ = outcome(open_engine(None, store))
    assert tier == ("corrupt" if cause == "corrupt" or "harms" in forgery else "remote")
    # The same in the local tier:
    with open_engine(tmp_path, None, signing_key=MAIN.secret_text(), **READS) as engine:
        assert isinstance(engine.save(KEY, GOOD), Saved)
    (there,) = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    there.write_bytes(data)
    assert outcome(open_engine(tmp_path, None, **READS)) == expected


def test_a_good_entry_is_used_in_each_of_these_places(tmp_path: Path) -> None:
    """So the forgeries above were refused for their content, not for their place."""
    placed(store := MemoryStore(), GOOD_SIGNED)
    assert outcome(open_engine(tmp_path, store, **READS)) == ("remote", set())
    assert outcome(open_engine(tmp_path, None, **READS)) == ("local", set())


def test_a_signature_does_not_prove_another_statement() -> None:
    """A signature proves nothing for another audience, time or expiry."""
    judge = Policy("require", (Trusted("main", PUBLIC), Trusted("pulls", PUBLIC)), now=lambda: NOW)
    data = signed(GOOD, issued_s=NOW, ttl_s=60)
    found = frame.decode(data, admit=judge.check)
    (one,) = unpack(found.signatures)
    for changes in ({"audience": "pulls"}, {"expires_s": 0}, {"issued_s": 1}):
        more = replace(one, **changes)
        with pytest.raises(UntrustedError, match="bad-signature"):
            frame.decode(with_signatures(GOOD, pack([more])), admit=judge.check)


# -- squatting


def flooded(count: int, make: Callable[[int], bytes], first: bytes) -> MemoryStore:
    """Return a store with ``count`` variants, and ``first`` under the name that they share."""
    store = MemoryStore()

    async def flood() -> None:
        await store.put(entries.first_name(KEY), first)
        for number in range(count):
            await store.put(entries.variant_name(KEY, f"x{number}"), make(number))

    asyncio.run(flood())
    return store


def squatters(number: int) -> bytes:
    return bytes(entry(variant=f"x{number}", payload=bytes(100_000)).data)


def fetched(engine: Engine) -> int:
    return sum(verb.bytes_in for verb in engine.stats().remote.values())


def test_a_thousand_squatters_cost_a_reader_little_and_hide_no_saved_entry() -> None:
    """They have 100 MB under the reader's key; it reads a few headers, and gives up."""
    store = flooded(1_000, squatters, b"")
    huge = bytes(entry(payload=bytes(20 << 20)).data)
    for data, refused in ((squatters(0), 32), (b"no frame", 31), (huge, 32)):
        put(store, entries.first_name(KEY), data)
        with open_engine(None, store, **READS) as engine:
            engine.lookup(KEY)
            assert sum(engine.stats().refused.values()) == refused
            assert fetched(engine) < len(data) % (20 << 20) + 32 * frame.HEADER_HINT_BYTES + 4096
        with open_engine(None, store, signing_key=MAIN.secret_text(), **READS) as writer:
            assert isinstance(writer.save(KEY, entry(variant="ours", payload=b"ours")), Saved)
            assert writer.flush(20).complete
        with open_engine(None, store, **READS) as engine:
            found = engine.lookup(KEY)
        assert isinstance(found, Hit)
        assert payload(found.entry) == b"ours"
        asyncio.run(store.delete(entries.variant_name(KEY, "ours")))


def test_downloads_of_damaged_variants_are_bounded() -> None:
    store = flooded(100, lambda number: squatters(number)[:-1], squatters(0)[:-1])
    engine = open_engine(None, store)
    assert outcome(engine)[0] == "corrupt"
    assert fetched(engine) < 33 * 100_300
    assert engine.stats().set_aside["remote"] == 32


def test_the_number_of_variants_that_are_tried_is_bounded() -> None:
    others = lambda number: bytes(entry(variant=f"x{number}").data)  # noqa: E731
    engine = open_engine(None, flooded(400, others, bytes(entry().data)))
    with engine, engine.candidates(KEY) as lookup:
        assert len(list(lookup)) == 257


# -- mutations

COUNT = int(os.environ.get("S3CACHE_TEST_MUTATIONS", examples(40)))


@pytest.mark.timeout(60 + COUNT / 100)
@pytest.mark.parametrize("algorithm", Algorithm)
def test_no_mutation_is_accepted(algorithm: Algorithm) -> None:
    """This includes mutations with correct digests, which any attacker can compute."""
    reader = Reader(algorithm)
    forgery = Forgery((*reader.good, *reader.refused), random.Random(f"{algorithm} {COUNT}"))
    changed = 0
    for _ in range(COUNT):
        data = forgery.any()
        if data not in reader.good:
            changed += 1
            assert reader.admitted(data) is None
        assert reader.forgery(data) is None
    assert changed > COUNT * 0.9
    # A reader that accepts every signature is caught.
    reader.judge = lambda _digest, _block: None
    assert any(reader.forgery(forgery.any()) for _ in range(100))


@pytest.mark.timeout(60 + COUNT / 100)
@pytest.mark.parametrize("algorithm", Algorithm)
def test_other_signatures_beside_a_valid_one_may_be_anything(algorithm: Algorithm) -> None:
    """They prove nothing and take nothing away; the content is still what was signed."""
    reader = Reader(algorithm)
    forgery = Forgery(reader.ample, random.Random(f"{algorithm} {COUNT}"))
    mutations = [forgery.any() for _ in range(COUNT)]
    assert all(reader.forgery(data) is None for data in mutations)
    changed = [data for data in mutations if data not in reader.ample]
    assert any(reader.admitted(data) is not None for data in changed)
