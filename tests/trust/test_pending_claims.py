"""Pending uploads of another process, and the processes that may claim them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from s3cache import entries
from s3cache.cache import Cache, Engine, Hit, Saved
from s3cache.errors import AccessDeniedError
from s3cache.store import MemoryStore, Store, WrapperStore
from s3cache.trust import generate
from tests.support.caching import entry, open_engine
from tests.support.marks import slow
from tests.support.proxy import Link, Proxy
from tests.support.stores import GatedStore
from tests.support.waiting import LONG_S, eventually

NAMES = [f"{number:032}" for number in range(5)]
OWN = "f" * 32
SSE_C = {"sse": "C", "sse_c_key": base64.b64encode(b"k" * 32).decode()}


class ReadOnly(WrapperStore):
    """A store on which these credentials may not write."""

    async def put(self, *args: Any, **options: Any) -> None:
        raise AccessDeniedError("not allowed", op="put")


@contextmanager
def opened(place: Path, store: Store, **settings: Any) -> Iterator[Engine]:
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
    with opened(local, ReadOnly(store)) as reader:
        assert isinstance(reader.save(OWN, entry(OWN)), Saved)
        assert not reader.flush(20).complete

        def only_its_own_is_left() -> bool:
            with opened(local, store) as writer:
                assert writer.flush(20).complete
            (name, *others) = pending(local)
            return not others and entries.name_prefix(OWN).rpartition("/")[2][:-1] in name

        eventually(only_its_own_is_left)
    with opened(local, store) as writer:
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
    with opened(local, store, trusted_keys=ours.public_text()) as claimer:
        assert isinstance(claimer.save(OWN, entry(OWN)), Saved)  # unsigned, but its own entry
        assert claimer.flush(20).complete
    assert caplog.text == ""
    assert len(pending(local)) == len(NAMES)
    both = f"{ours.public_text()} {theirs.public_text()}"
    with opened(local, store, trusted_keys=both) as successor:
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
