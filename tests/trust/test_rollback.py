"""Who may write can bring an older entry back; what that is worth ends with it, or is revoked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from s3cache import entries, frame
from s3cache.cache import Hit, Saved
from s3cache.store import MemoryStore
from s3cache.trust import generate
from tests.support.caching import KEY, OTHER, entry, open_engine, payload

if TYPE_CHECKING:
    from s3cache.store import Buffer

MAIN = generate("ci-main")
SIGNS = {"signing_key": MAIN.secret_text()}
READS = {"trusted_keys": MAIN.public_text()}
NAME = entries.first_name(KEY)


def signed(content: bytes, **settings: object) -> Buffer:
    """What a trusted machine puts into the bucket."""
    store = MemoryStore()
    engine = open_engine(None, store, **SIGNS, **settings)
    assert isinstance(engine.save(KEY, entry(payload=content)), Saved)
    assert engine.flush(20).complete
    engine.close()
    found = asyncio.run(store.get(NAME))
    assert found is not None
    return found


def read(data: Buffer, name: str = NAME, key: str = KEY, **settings: object) -> bytes | str:
    """What a reader who asks for signatures makes of a bucket with this in it."""
    store = MemoryStore()
    asyncio.run(store.put(name, data))
    engine = open_engine(None, store, **READS, **settings)
    found = engine.lookup(key)
    engine.close()
    return payload(found.entry) if isinstance(found, Hit) else str(found.reason)


def test_an_older_entry_of_the_same_key_is_used_until_it_is_revoked() -> None:
    """It is what that key's code was: a signature says who made it, and not that it is the last."""
    old, new = signed(b"old"), signed(b"new")
    assert [read(data) for data in (old, new)] == [b"old", b"new"]
    revoked = frame.decode(old).digest.hex()
    assert [read(data, revoked=revoked) for data in (old, new)] == ["untrusted", b"new"]


def test_an_older_entry_is_used_under_its_own_key_only() -> None:
    assert read(signed(b"old"), entries.first_name(OTHER), OTHER) == "corrupt"
