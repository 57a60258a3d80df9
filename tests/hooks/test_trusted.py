"""With a trusted key nothing that nobody signed is unpickled or run, wherever it lies."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest

from s3cache import frame
from s3cache.trust import generate, pack, sign
from tests.support.density import dense

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(400)

KEY, STRANGER = generate("ci"), generate("ci")
TRUSTING = {"S3CACHE_TRUSTED_KEYS": KEY.public_text()}
SIGNING = {"S3CACHE_SIGNING_KEY": KEY.secret_text()}


class Betrayal:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@dense
def test_what_torch_keeps_by_itself_is_not_used(site: Site, tmp_path: Path) -> None:
    """What it loads of others' artifacts, and its own directory, are signed by nobody."""
    artifacts = str(tmp_path / "artifacts")
    nobody = {"S3CACHE_LOCAL": "no"}
    site.machine("exporter", **nobody).run("trusted:compiled", site.url, "", artifacts)

    def hits(name: str, remote: str, loaded: str, **environment: str) -> int:
        machine = site.machine(name, **nobody, **environment)
        url = f"file://{tmp_path}/{remote}?create=1"
        found = machine.run("trusted:compiled", url, loaded)
        halves: int = found["inductor"].get("fxgraph_cache_hit", 0)
        whole: int = found["torch"].get("autograd_cache_hit", 0)
        return whole + halves

    assert hits("one", "empty 1", artifacts) == 1
    assert hits("two", "empty 2", artifacts, **TRUSTING) == 0
    # The first has them in torch's own directory now.
    assert hits("one", "empty 3", "", **TRUSTING) == 0
    assert hits("one", "empty 4", "") == 1


def test_a_signed_entry_hits_and_a_forged_one_runs_nothing(site: Site, tmp_path: Path) -> None:
    saved = site.machine("writer", **SIGNING, **TRUSTING).run("trusted:compiled", site.url)
    assert saved["saved"] == 1
    hit = site.machine("reader", **TRUSTING).run("trusted:compiled", site.url)
    assert (hit["hits"]["remote"], hit["refused"]) == (1, {})
    _betray(site, _by_a_stranger, tmp_path / "betrayed")
    _is_refused(site, tmp_path / "betrayed")


@dense
def test_no_forged_entry_runs_anything(site: Site, tmp_path: Path) -> None:
    trace = tmp_path / "betrayed"
    site.machine("writer", **SIGNING, **TRUSTING).run("trusted:compiled", site.url)
    good = {path: path.read_bytes() for path in site.entries()}
    for forge in (_unsigned, _moved):
        for path, data in good.items():
            path.write_bytes(data)
        _betray(site, forge, trace)
        _is_refused(site, trace, forge.__name__)
    site.machine("careless").run("trusted:compiled", site.url)
    assert trace.exists()  # it would have


def _betray(site: Site, forge: Callable[[bytes, bytes], bytes], trace: Path) -> None:
    """Put something else into each entry, as somebody who may write and has no key."""
    evil = pickle.dumps(Betrayal(trace))
    for path in site.entries():
        path.write_bytes(forge(path.read_bytes(), evil))


def _is_refused(site: Site, trace: Path, name: str = "victim") -> None:
    machine = site.machine(name, S3CACHE_MODE="read-only", **TRUSTING)
    found = machine.run("trusted:compiled", site.url)
    assert sum(found["hits"].values()) == 0
    assert found["misses"] == {"untrusted": 1}
    assert sum(found["refused"].values()) >= 1
    assert not trace.exists()


def _forged(data: bytes, evil: bytes) -> frame.Frame:
    there = frame.decode(data)
    head = there.header
    return frame.decode(
        frame.encode(
            kind=head.kind,
            key=head.key,
            variant=head.variant,
            schema=head.schema,
            meta=head.meta,
            sections=dict.fromkeys(there.names, evil),
        )
    )


def _unsigned(data: bytes, evil: bytes) -> bytes:
    return bytes(_forged(data, evil).data)


def _by_a_stranger(data: bytes, evil: bytes) -> bytes:
    """Who uses the same name."""
    return frame.signed(
        _forged(data, evil),
        lambda digest: pack([sign(digest, STRANGER, audience="main", issued_s=1, ttl_s=0)]),
    )


def _moved(data: bytes, evil: bytes) -> bytes:
    """With the signature of the good one."""
    signatures = frame.decode(data).signatures
    return frame.signed(_forged(data, evil), lambda _: signatures)
