"""A policy applies wherever bytes become an entry; untrusted entries hide no trusted one.

Pending uploads of another process are uploaded by processes that trust them, and may write.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from s3cache import entries, frame
from s3cache.cache import Cache, Engine, Hit, Miss, Saved
from s3cache.errors import ConfigError
from s3cache.frame import Frame
from s3cache.settings import Settings
from s3cache.store import MemoryStore, Store
from s3cache.trust import Algorithm, SigningKey, VerifyKey, generate, policy_of
from tests.support.caching import KEY, OTHER, entry, open_engine, payload
from tests.support.faulty import FaultyStore
from tests.support.marks import slow
from tests.support.proxy import Link, Proxy
from tests.support.stores import DenyingStore, GatedStore, put
from tests.support.users import needs_users
from tests.support.waiting import LONG_S, eventually

MAIN, PULLS = generate("ci-main"), generate("ci-pulls", Algorithm.HMAC_SHA256)
BOTH = f"{MAIN.public_text()} pulls={PULLS.public_text()}"


def writes(key: SigningKey = MAIN, **changes: Any) -> dict[str, Any]:
    return {"signing_key": key.secret_text(), **changes}


READS: dict[str, Any] = {"trusted_keys": MAIN.public_text()}


def save(store: MemoryStore, *found: Frame, **settings: Any) -> None:
    """Save entries from another machine with these settings."""
    with open_engine(None, store, **settings) as engine:
        for each in found:
            assert isinstance(engine.save(each.header.key, each), Saved)
        assert engine.flush(20).complete


def stored(store: Store) -> Frame:
    data = asyncio.run(store.get(entries.first_name(KEY)))
    assert isinstance(data, bytes)
    return frame.decode(data)


def read(store: Store | None, place: Path | None = None, key: str = KEY, **settings: Any) -> str:
    with open_engine(place, store, **settings) as engine:
        found = engine.lookup(key)
    return found.tier if isinstance(found, Hit) else str(found.reason)


def read_payload(store: MemoryStore | None, place: Path | None = None) -> bytes:
    with open_engine(place, store, **READS) as engine:
        found = engine.lookup(KEY)
    assert isinstance(found, Hit)
    return payload(found.entry)


@pytest.mark.parametrize(
    ("writer", "reader", "expected"),
    [
        ({}, READS, "untrusted"),
        ({}, {**READS, "trust": "off"}, "remote"),
        (writes(generate("ci-main")), READS, "untrusted"),
        (writes(PULLS, audience="pulls"), {"trusted_keys": BOTH}, "remote"),
        (writes(), {"trusted_keys": BOTH, "audience": "pulls"}, "untrusted"),
        (writes(signature_ttl_s=3600), READS, "remote"),
    ],
)
def test_trust_policy_decides_which_entries_are_used(
    writer: dict[str, Any], reader: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    store = MemoryStore()
    save(store, entry(), **writer)
    assert read(store, tmp_path / "local", **reader) == expected
    # An entry is stored locally only if it was used.
    there = [path for path in (tmp_path / "local" / "objects").rglob("*") if path.is_file()]
    assert bool(there) == (expected == "remote")


def test_a_refusal_is_counted_and_warned_of_once_but_not_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    save(store, entry(), entry(OTHER))
    engine = open_engine(None, store, strict=True, **READS)
    with caplog.at_level(logging.WARNING, "s3cache"):
        assert not any(isinstance(engine.lookup(key), Hit) for key in (KEY, OTHER))
    (message,) = (record.getMessage() for record in caplog.records)
    assert message == (
        "an entry is not used: an entry is not trusted (unsigned): it has no signature "
        "(s3cache explain untrusted)"
    )
    stats = engine.stats()
    assert dict(stats.refused) == {"unsigned": 2}
    assert {str(reason): count for reason, count in stats.misses.items()} == {"untrusted": 2}
    assert "2 missed (2 untrusted), 0 bypassed, 2 not trusted (2 unsigned)" in stats.in_words()
    with engine.candidates(KEY, "fx") as lookup:
        assert list(lookup) == []
    stats = engine.stats()
    assert (dict(stats.refused), dict(stats.fx.refused)) == ({"unsigned": 2}, {"unsigned": 1})
    engine.close()


def test_a_probe_finds_entries_without_counting_a_lookup(tmp_path: Path) -> None:
    store = MemoryStore()
    save(store, entry())
    save(store, entry(OTHER), **writes())
    with open_engine(tmp_path, store, **READS) as engine:
        found = [engine.probe(key) for key in (KEY, OTHER, OTHER, "0" * 32)]
        assert found == ["untrusted (1 unsigned)", "remote", "local", "absent"]
        assert (engine.stats().lookups, dict(engine.stats().refused)) == (0, {})


def test_earlier_entries_on_the_disk_are_checked_too(tmp_path: Path) -> None:
    with open_engine(tmp_path, None) as engine:
        engine.save(KEY, entry())
    assert read(None, tmp_path, **READS) == "untrusted"
    # The entry is not lost: a process without trust hits it, and a signed save replaces it.
    assert read(None, tmp_path) == "local"
    with open_engine(tmp_path, None, **READS, **writes()) as engine:
        engine.save(KEY, entry(payload=b"signed"))
    assert read_payload(None, tmp_path) == b"signed"


_SQUATS = entries.first_name(KEY), entries.variant_name(KEY, "v")


@pytest.mark.parametrize("squatted", [_SQUATS[:1], _SQUATS[1:], _SQUATS])
def test_untrusted_entries_do_not_hide_a_trusted_one(squatted: tuple[str, ...]) -> None:
    store = MemoryStore()
    ours = entry(variant="v", payload=b"ours")
    for place in squatted:
        put(store, place, entry(variant="v", payload=b"theirs").data)
    assert read(store, **READS) == "untrusted"
    save(store, ours, **READS, **writes())
    assert read_payload(store) == b"ours"


def test_a_process_that_claims_uploads_signs_nothing(tmp_path: Path) -> None:
    """Otherwise a user who can leave a pending upload could have any entry signed."""
    store = FaultyStore(MemoryStore())
    store.inject("put", "error", times=1_000)
    gone = open_engine(tmp_path, store)
    assert isinstance(gone.save(KEY, entry()), Saved)
    gone.close(0)
    store.clear()
    with started(tmp_path, store, **writes()) as claimer:
        assert claimer.flush(20).complete
    assert stored(store.inner).signatures == b""


def test_an_entry_is_used_until_its_key_or_its_digest_is_revoked() -> None:
    """This includes older entries: a signature names the signer, not the latest entry."""
    store = MemoryStore()
    save(store, entry(), **writes())
    assert read(store, **READS) == "remote"
    fingerprint = VerifyKey.parse(MAIN.public_text()).fingerprint
    digest = stored(store).digest.hex()
    for revoked in (fingerprint, digest, f"{'0' * 32},{digest.upper()}"):
        assert read(store, revoked=revoked, **READS) == "untrusted"
    with pytest.raises(ConfigError, match="32 or 64 hexadecimal digits"):
        read(store, revoked="abc", **READS)


# -- code, the environment and the machine's file


def test_the_environment_does_not_weaken_the_trust_that_code_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("S3CACHE_TRUST", "off")
    monkeypatch.setenv("S3CACHE_TRUSTED_KEYS", PULLS.public_text())
    url = f"file://{tmp_path}/remote?create=1"
    with Cache.open(url, local=False) as cache:
        cache.save(KEY, entry())
        assert cache.flush(20).complete
        assert isinstance(cache.lookup(KEY), Hit)  # the code sets no trust
    with Cache.open(url, local=False, trusted_keys=MAIN.public_text()) as cache:
        found = cache.lookup(KEY)
        assert isinstance(found, Miss)
        assert str(found.reason) == "untrusted"


def test_the_environment_sets_no_audience_for_keys_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This covers keys that code names without an audience, and keys in the machine's file."""
    monkeypatch.setenv("S3CACHE_AUDIENCE", "pulls")

    def audiences(**options: Any) -> dict[str, str]:
        settings = Settings.load(**options)[0]
        found = policy_of(
            None, settings.trusted_keys or "", "", audience=settings.audience,
            machine_file=str(tmp_path / "trust.json"),
        )  # fmt: skip
        return {each.key.name: each.audience for each in found.trusted}

    main, pulls = MAIN.public_text(), PULLS.public_text()
    both = f"{main}, pulls={pulls}"
    assert audiences(trusted_keys=both) == {"ci-main": "main", "ci-pulls": "pulls"}
    assert audiences(trusted_keys=main, audience="night") == {"ci-main": "night"}
    # The environment still sets the audience to sign for, and the audience of its own keys.
    assert Settings.load(trusted_keys=main)[0].audience == "pulls"
    monkeypatch.setenv("S3CACHE_TRUSTED_KEYS", main)
    assert audiences() == {"ci-main": "pulls"}
    if os.geteuid() == 0:
        machine(tmp_path / "trust.json", f'{{"trusted_keys": ["{main}"]}}')
        assert audiences() == audiences(audience="night") == {"ci-main": "main"}


def machine(path: Path, text: str, *, mode: int = 0o644) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@needs_users
def test_the_machines_file_sets_the_minimum_level(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"

    def level(requested: Any, keys: str, content: str) -> tuple[str, list[str]]:
        found = policy_of(requested, keys, "", audience="main", machine_file=machine(path, content))
        return found.level, [each.key.name for each in found.trusted]

    main, pulls = MAIN.public_text(), PULLS.public_text()
    theirs = f'{{"trusted_keys": ["{main}"]}}'
    assert level(None, "", theirs) == ("require", ["ci-main"])
    assert level("off", pulls, theirs) == ("require", ["ci-main"])
    assert level("off", pulls, '{"trust": "require"}') == ("require", ["ci-pulls"])
    assert level("off", pulls, '{"trust": "prefer"}') == ("prefer", ["ci-pulls"])
    assert level("require", pulls, '{"trust": "prefer"}') == ("require", ["ci-pulls"])
    assert level("off", pulls, "{}") == ("off", ["ci-pulls"])
    revoking = policy_of(
        None, main, "0" * 32, audience="main",
        machine_file=machine(path, f'{{"revoked": ["{"1" * 32}"]}}'),
    )  # fmt: skip
    assert revoking.revoked_keys == {"0" * 32, "1" * 32}


BAD = ["{", "[]", '{"trusted": []}', '{"trust": 1}', '{"trust": "maybe"}', '{"trusted_keys": [1]}']


@needs_users
@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        *(("{}", mode, "writable by users other") for mode in (0o664, 0o646)),
        *((text, 0o644, "other content") for text in BAD),
    ],
)
def test_an_unsafe_or_invalid_machines_file_is_an_error(
    text: str, mode: int, message: str, tmp_path: Path
) -> None:
    path = machine(tmp_path / "trust.json", text, mode=mode)
    with pytest.raises(ConfigError, match=message):
        policy_of(None, "", "", audience="main", machine_file=path)


# -- pending uploads of another process

NAMES = [f"{number:032}" for number in range(5)]
OWN = "f" * 32
SSE_C = {"sse": "C", "sse_c_key": base64.b64encode(b"k" * 32).decode()}


@contextmanager
def started(place: Path, store: Store, **settings: Any) -> Iterator[Engine]:
    """Open the engine of a process on the machine of ``place``, which looks for pending uploads."""
    with open_engine(place, store, **settings) as engine:
        engine.start()
        yield engine


def left_behind(place: Path, **settings: Any) -> None:
    """Save ``NAMES`` in a process that ends before it uploads any of them."""
    engine = open_engine(place, GatedStore(MemoryStore(), is_open=False), **settings)
    assert all(isinstance(engine.save(key, entry(key)), Saved) for key in NAMES)
    engine.close(0)
    assert len(pending(place)) == len(NAMES)


def pending(place: Path) -> list[str]:
    return [path.name for path in (place / "pending").glob("*@*")]


def test_a_reader_cannot_claim_uploads(tmp_path: Path) -> None:
    """The next process that may write uploads the entries, except those of a living process."""
    store, local = MemoryStore(), tmp_path / "local"
    left_behind(local)
    with started(local, DenyingStore(store, lambda verb, _: verb == "put")) as reader:
        assert isinstance(reader.save(OWN, entry(OWN)), Saved)
        assert not reader.flush(20).complete

        def only_its_own_is_left() -> bool:
            with started(local, store) as writer:
                assert writer.flush(20).complete
            (name, *others) = pending(local)
            return not others and entries.name_prefix(OWN).rpartition("/")[2][:-1] in name

        eventually(only_its_own_is_left)
    with started(local, store) as writer:
        assert writer.flush(20).complete
    assert pending(local) == []
    with open_engine(None, store) as other:
        assert all(isinstance(other.lookup(key), Hit) for key in (*NAMES, OWN))


def test_untrusted_pending_uploads_are_not_claimed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only their signature is read; a process that trusts the signer uploads them."""
    ours, theirs = generate("ours"), generate("theirs")
    store, local = MemoryStore(), tmp_path / "local"
    left_behind(local, signing_key=theirs.secret_text())
    with started(local, store, trusted_keys=ours.public_text()) as claimer:
        assert isinstance(claimer.save(OWN, entry(OWN)), Saved)  # unsigned, but its own entry
        assert claimer.flush(20).complete
    assert caplog.text == ""
    assert len(pending(local)) == len(NAMES)
    both = f"{ours.public_text()} {theirs.public_text()}"
    with started(local, store, trusted_keys=both) as successor:
        assert successor.flush(20).complete
    assert pending(local) == []


@pytest.mark.parametrize(
    "encryption",
    [pytest.param(SSE_C, id="C"), pytest.param({"sse": "aws:kms"}, id="aws:kms", marks=slow)],
)
def test_an_upload_waits_for_a_process_with_the_savers_encryption(
    proxy: Proxy,
    url: str,
    served_options: dict[str, str],
    tmp_path: Path,
    encryption: dict[str, str],
) -> None:
    """An SSE-C key is never on the disk, and nothing is uploaded without it."""
    local, where = tmp_path / "local", {**served_options, "endpoint_url": proxy.url}

    def opened(**options: Any) -> Cache:
        return Cache.open(url, **{"local_dir": str(local), **where, **options})

    proxy.link = Link(flows=False)
    gone = opened(**encryption)
    assert all(isinstance(gone.save(key, entry(key)), Saved) for key in NAMES)
    gone.close(0)
    proxy.heal()
    for path in local.rglob("*"):
        if path.is_file():
            assert b"k" * 32 not in path.read_bytes()
            assert SSE_C["sse_c_key"].encode() not in path.read_bytes()
    other = base64.b64encode(b"o" * 32).decode()
    for options in ({}, {"sse": "C", "sse_c_key": other}):
        with opened(**options) as cache:
            cache.save(OWN, entry(OWN))
            assert cache.flush(LONG_S).complete
        assert len(pending(local)) == len(NAMES)
    with opened(**encryption) as cache:
        assert cache.flush(LONG_S).complete
    assert [*(local / "pending").iterdir()] == []
    with opened(**encryption, local_dir=str(tmp_path / "other"), lookup_timeout_s=60) as cache:
        assert all(isinstance(cache.lookup(key), Hit) for key in NAMES)
