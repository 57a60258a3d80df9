"""Pending uploads of another process, and the processes that may claim them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from s3cache import entries
from s3cache.trust import generate
from tests.support.gate import Gate, refusal, refusing
from tests.support.marks import slow
from tests.support.processes import Machine
from tests.support.proxy import Link, Proxy
from tests.support.served import NewMachine
from tests.support.waiting import eventually
from tests.support.worker import keys

SIZE = 1_000
QUICK = {"exit_timeout_s": 2.0, "lookup_timeout_s": 20.0}
NAMES = keys(0, 5)
SSE_C = {"sse": "C", "sse_c_key": base64.b64encode(b"k" * 32).decode()}


def test_a_reader_cannot_claim_uploads(new_machine: NewMachine, moto_port: int) -> None:
    """The next process that may write uploads the entries."""
    with Gate(moto_port) as gate:
        url = f"http://127.0.0.1:{gate.port}"
        gate.rule = lambda method, *_: refusal(503, "SlowDown") if method == "PUT" else None
        machine = new_machine(endpoint_url=url, **QUICK)
        saver = machine.start(["save", NAMES, SIZE], ["hear"])
        saver.until("saved", len(NAMES))
        saver.kill()
        by_reader = refusing("PUT")
        gate.rule = lambda method, target, headers: (
            by_reader(method, target, headers) if "=reader/" in str(headers) else None
        )
        # The reader finds the records when it opens its cache; the server refuses its uploads.
        reader = machine.start(
            ["save", ["key-own"], SIZE], ["flush", 10.0], ["hear"], access_key="reader"
        )
        reader.until("flushed")
        own = f"{entries.name_prefix('key-own')}_"
        eventually(lambda: machine.run(["flush"]) == ["flushed 0"] and machine.pending() == [own])
        reader.kill()
        machine.run(["flush"])
        assert machine.pending() == []
    # The same bucket, without the gate.
    lines = new_machine(**QUICK).run(["check", [*NAMES, "key-own"]])
    assert [line.split()[0] for line in lines] == ["hit"] * (len(NAMES) + 1)


def left_behind(machine: Machine, proxy: Proxy, **options: Any) -> None:
    """Save ``NAMES`` in a process with these options; kill it before it uploads any."""
    proxy.link = Link(flows=False)
    process = machine.start(["save", NAMES, SIZE], ["hear"], **options)
    process.until("saved", len(NAMES))
    process.kill()
    assert len(machine.pending()) == len(NAMES)
    proxy.heal()


def test_untrusted_pending_uploads_are_not_claimed(proxy: Proxy, new_machine: NewMachine) -> None:
    """Only their signature is read; a process that trusts the signer uploads them."""
    ours, theirs = generate("ours"), generate("theirs")
    trusting: dict[str, Any] = {"trusted_keys": ours.public_text()}
    machine = new_machine(endpoint_url=proxy.url, **QUICK)
    left_behind(machine, proxy, signing_key=theirs.secret_text())
    claimer = machine.start(["save", ["key-own"], SIZE], ["flush"], **trusting)
    assert claimer.finish() == [
        "saved key-own -",
        "flushed 0",
    ]  # unsigned, but its own entry
    assert claimer.errors == ""
    assert len(machine.pending()) == len(NAMES)
    machine.run(["flush"], trusted_keys=f"{ours.public_text()} {theirs.public_text()}")
    assert machine.pending() == []


@pytest.mark.parametrize(
    "encryption",
    [pytest.param(SSE_C, id="C"), pytest.param({"sse": "aws:kms"}, id="aws:kms", marks=slow)],
)
def test_an_upload_waits_for_a_process_with_the_savers_encryption(
    proxy: Proxy, new_machine: NewMachine, encryption: dict[str, str]
) -> None:
    """An SSE-C key is never on the disk, and nothing is uploaded without it."""
    machine = new_machine(endpoint_url=proxy.url, **QUICK)
    left_behind(machine, proxy, **encryption)
    for path in machine.tier.rglob("*"):
        if path.is_file():
            assert b"k" * 32 not in path.read_bytes()
            assert SSE_C["sse_c_key"].encode() not in path.read_bytes()
    other = base64.b64encode(b"o" * 32).decode()
    for options in ({}, {"sse": "C", "sse_c_key": other}):
        assert machine.run(["save", ["key-own"], SIZE], ["flush"], **options)[-1] == "flushed 0"
        assert len(machine.pending()) == len(NAMES)
    assert machine.run(["flush"], **encryption) == ["flushed 0"]
    assert machine.leftovers() == []
    lines = new_machine(**encryption).run(["check", NAMES])
    assert [line.split()[0] for line in lines] == ["hit"] * len(NAMES)
