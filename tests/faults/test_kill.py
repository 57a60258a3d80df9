"""Processes end in every possible way; exactly the entries that they acknowledged arrive."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from typing import Any

import pytest

from tests.support.marks import cases, examples, slow
from tests.support.processes import Machine
from tests.support.proxy import Link, Proxy
from tests.support.served import NewMachine, check_all_arrived
from tests.support.waiting import LONG_S, eventually
from tests.support.worker import keys

SIZE = 30_000
HANGS = Link(flows=False)
# No process waits long for a dead server or for the end of a pause.
QUICK = {"exit_timeout_s": 2.0, "lookup_timeout_s": 20.0}


def check_all_arrive(machine: Machine, other: Machine, expected: list[str]) -> None:
    """Check that the next process uploads all recorded entries, and that ``other`` reads them."""
    assert machine.run(["flush"]) == ["flushed 0"]
    assert machine.leftovers() == []
    check_all_arrived(other, expected)


def test_entries_that_killed_processes_acknowledged_arrive(
    proxy: Proxy, new_machine: NewMachine
) -> None:
    """kill -9 ends several pairs of uploaders, one pair after the other; no entry is lost."""
    chance = random.Random(1)
    machine = new_machine(endpoint_url=proxy.url, **QUICK)
    proxy.link = Link(bytes_per_s=150_000)
    acknowledged: list[str] = []
    left_behind = 0
    rounds = examples(0.12)
    for round_ in range(rounds):
        pair = [
            # Only a kill ends this process.
            machine.start(["save", keys(0, 40, f"{round_}-{each}-"), SIZE], ["hear"], events=True)
            for each in range(2)
        ]
        for process in pair:
            # It saves or uploads its first entries, or has uploaded several.
            process.until(*chance.choice([("saved", 1), ("upload started", 1), ("upload done", 3)]))
            time.sleep(chance.choice([0.0, 0.005, 0.05, 0.2]) * chance.random())
            process.kill()
            acknowledged += process.acknowledged()
        left_behind += bool(machine.pending())
    assert left_behind == rounds, "after some round, no upload was pending"

    # Until another process continues the uploads, a lookup finds a whole entry or none.
    early = new_machine().run(["check", acknowledged])
    assert {line.split()[0] for line in early} == {"hit", "miss"}
    assert all(line.endswith((" remote", " absent")) for line in early)

    proxy.link = Link()
    machine.let_an_hour_pass()
    check_all_arrive(machine, new_machine(), acknowledged)


def test_a_process_killed_while_it_saves_leaves_the_entry_whole(
    proxy: Proxy, new_machine: NewMachine
) -> None:
    """The previous entry stays; the half-written one is never found and is deleted."""
    proxy.link = HANGS
    machine = new_machine(endpoint_url=proxy.url, **QUICK)
    for _ in range(20):
        process = machine.start(["save_for_ever", "key", 10_000_000])
        process.until("saved", 2)
        eventually(lambda: any(machine.tier.glob("staging/*")))
        process.kill()
        if [*machine.tier.glob("staging/*")]:
            break
    else:
        pytest.fail("no process was killed while saving")
    proxy.heal()
    machine.let_an_hour_pass()
    assert machine.run(["check", ["key"]], ["flush"]) == ["hit key local", "flushed 0"]
    assert machine.leftovers() == []
    check_all_arrived(new_machine(), ["key"])


def test_two_successors_upload_each_entry_once(proxy: Proxy, new_machine: NewMachine) -> None:
    """If two processes find the same records, exactly one of them uploads each entry."""
    machine = new_machine(endpoint_url=proxy.url, **QUICK)
    proxy.link = HANGS
    names = keys(0, 60)
    process = machine.start(["save", names, 1_000])
    process.until("saved", len(names))
    process.kill()
    assert len(machine.pending()) == len(names)

    proxy.heal()
    successors = [machine.start(["flush"], events=True) for _ in range(2)]
    lines = [line for successor in successors for line in successor.finish()]
    done = Counter(line.split()[2] for line in lines if line.startswith("upload done"))
    assert set(done.values()) == {1}
    assert len(done) == len(names)
    written = Counter(proxy.made("PUT", "/v1/"))
    # Each process writes its first entry again, to see whether the server honours the condition.
    assert sum(written.values()) <= len(names) + len(successors)
    assert set(written.values()) <= {1, 2}
    assert len(written) == len(names)
    assert machine.leftovers() == []
    check_all_arrived(new_machine(), names)


@slow
@pytest.mark.parametrize(
    ("link", "steps", "sent", "status"),
    [
        (HANGS, [], None, 0),
        (Link(bytes_per_s=1_000), [], None, 0),
        (HANGS, [], signal.SIGTERM, -signal.SIGTERM),
        (HANGS, [["exit_on_sigterm"]], signal.SIGTERM, 3),
    ],
    ids=["hangs", "slow", "killed by SIGTERM", "exits on SIGTERM"],
)
def test_an_end_waits_at_most_the_exit_timeout(
    link: Link, steps: Any, sent: Any, status: int, proxy: Proxy, new_machine: NewMachine
) -> None:
    """A server that hangs or is too slow costs ``exit_timeout_s``, but no entry."""
    proxy.link = link
    machine = new_machine(endpoint_url=proxy.url, exit_timeout_s=1.0)
    last = [["work"]] if sent else []
    process = machine.start(*steps, ["save", keys(0, 20), SIZE], ["say", "end"], *last)
    process.until("at end")
    started = time.monotonic()
    if sent:
        process.signal(sent)
    assert process.wait() == status
    assert time.monotonic() - started < LONG_S
    if not sent:
        process.finish()
        assert "recorded for the next process on this machine: 20; lost: 0" in process.errors
    proxy.heal()
    check_all_arrive(machine, new_machine(), keys(0, 20))


# --- forked children


@slow
def test_children_save_and_look_up_while_their_parent_uploads(
    proxy: Proxy, new_machine: NewMachine
) -> None:
    """No entry is lost with any kind of child."""
    proxy.link = Link(bytes_per_s=500_000)
    machine = new_machine(endpoint_url=proxy.url)
    mine = keys(0, 20, "parent")

    def child(name: str) -> list[list[object]]:
        return [["check", mine[:2]], ["save", keys(0, 5, name), SIZE]]

    lines = machine.run(
        ["save", mine, SIZE],
        ["fork", child("fork-a")],
        ["fork", child("fork-b"), "sys.exit"],
        ["processes", "fork", [child("process-a"), child("process-b")]],
        ["processes", "spawn", [child("spawn-a"), child("spawn-b")]],
    )
    assert lines.count("child 0") == 6
    hits = [line for line in lines if line.startswith("hit")]
    assert len(hits) == 12
    # A child that ends by os._exit uploads nothing itself; other processes upload its entries.
    children = ("fork-a", "fork-b", "process-a", "process-b", "spawn-a", "spawn-b")
    theirs = [key for name in children for key in keys(0, 5, name)]
    check_all_arrive(machine, new_machine(), mine + theirs)


@pytest.mark.parametrize(
    "module",
    cases(
        ["botocore.compat", "aiohttp", "aioboto3", "s3transfer"],
        slow_ones=["aiohttp", "aioboto3", "s3transfer"],
    ),
)
def test_a_child_can_be_forked_while_the_client_is_created(
    module: str, new_machine: NewMachine
) -> None:
    """A module that the background thread has half imported neither blocks nor breaks the child."""
    machine = new_machine(**QUICK)
    lines = machine.run(
        ["until_imported", module],
        ["fork", [["save", keys(0, 3), SIZE], ["flush"], ["check", keys(9, 1)]], "sys.exit"],
    )
    assert "child 0" in lines
    assert "flushed 0" in lines
    assert "miss key-0009 absent" in lines
