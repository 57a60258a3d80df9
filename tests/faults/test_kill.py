"""Processes end in every possible way, or run out of memory or descriptors; no entry is lost."""

from __future__ import annotations

import json
import random
import signal
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import cases, examples, nightly, slow
from tests.support.processes import Machine
from tests.support.proxy import Link, Proxy
from tests.support.scripts import python
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
    rounds, moments = examples(0.04), [("upload done", 3), ("saved", 1), ("upload started", 1)]
    for round_ in range(rounds):
        pair = [
            # Only a kill ends this process.
            machine.start(["save", keys(0, 40, f"{round_}-{each}-"), SIZE], ["hear"], events=True)
            for each in range(2)
        ]
        for process in pair:
            # It saves or uploads its first entries, or has uploaded several.
            process.until(*moments[round_ % 3])
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


@slow
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


@slow
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
        pytest.param(Link(bytes_per_s=1_000), [], None, 0, marks=nightly),
        pytest.param(HANGS, [], signal.SIGTERM, -signal.SIGTERM, marks=nightly),
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
        slow_ones=["aiohttp"],
        nightly_ones=["aioboto3", "s3transfer"],
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


REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20
LARGE, SMALL = 4 * MIB, 2_000
THERE, OURS, LITTLE = keys(0, 3, "there"), keys(0, 3, "ours"), keys(0, 5, "little")

needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def run(script: str, machine: Machine, *arguments: Any, **environment: str) -> tuple[Any, str]:
    """Return the JSON that the script prints, and its standard error."""
    done = python(
        "-c",
        textwrap.dedent(script),
        json.dumps([machine.options, *arguments]),
        env={**machine.environment, "PYTHONPATH": str(REPOSITORY), **environment},
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout), done.stderr


NO_MEMORY = """
    import json, resource, sys
    from s3cache import Cache
    from s3cache.cache import Hit, Saved
    from tests.support.worker import entry

    options, there, ours, left = json.loads(sys.argv[1])
    whole = {key: entry(key, size) for key, size in ours.items()}
    cache = Cache.open(**options)
    first, *others = there
    assert isinstance(cache.lookup(first), Hit)  # creates the client and imports all modules
    assert cache.flush(200).complete

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    held, size = [], 64 << 20
    while size >= left:
        try:
            held.append(bytes(size))  # uses the free memory below the limit
        except MemoryError:
            size //= 2
    seen, losses = {"lookups": [], "saves": []}, []

    def train():
        losses.append(sum(0.1 * each for each in range(1000)))

    def outcome(result):
        if isinstance(result, Hit):
            right = bytes(result.entry.data) == whole[result.entry.header.key]
            return "hit" if right else "WRONG"
        if isinstance(result, Saved):
            return "durable" if result.durable else "in memory"
        reason = str(result.reason)
        return reason if reason == "machine" else f"{reason}: {result.error!r}"

    for key in others:
        seen["lookups"].append(outcome(cache.lookup(key)))
        train()
    for key, data in [*whole.items()]:
        seen["saves"].append(outcome(cache.save(key, data)))
        train()
    cache.flush(1)
    seen["trained"] = len(losses) == len(others) + len(ours) and len({*losses}) == 1

    del held
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    whole.update({key: entry(key, size) for key, size in there.items()})
    seen["after"] = [outcome(cache.lookup(key)) for key in there]
    seen["again"] = [outcome(cache.save(key, whole[key])) for key in ours]
    seen["found"] = [outcome(cache.lookup(key)) for key in ours]
    seen["remaining"] = cache.flush(200).remaining
    print(json.dumps(seen), flush=True)
    """


@needs_proc
@pytest.mark.parametrize("left", [2 * MIB, pytest.param(64 << 10, marks=nightly)])
def test_a_process_without_memory_continues(new_machine: NewMachine, left: int) -> None:
    """No call raises, and neither an entry nor the server is blamed. Once memory is free again,
    each lookup hits, and all saved entries are there."""
    new_machine().run(["save", THERE, LARGE], ["flush", LONG_S])
    machine = new_machine(lookup_timeout_s=LONG_S, exit_timeout_s=5.0, breaker_failures=1)
    sizes = {**dict.fromkeys(OURS, LARGE), **dict.fromkeys(LITTLE, SMALL)}
    seen, _ = run(
        NO_MEMORY,
        machine,
        dict.fromkeys(THERE, LARGE),
        sizes,
        left,
        # Freed memory returns to the system at once, so that the next allocation fails.
        MALLOC_ARENA_MAX="1",
        MALLOC_MMAP_THRESHOLD_=str(MIB // 2),
    )
    assert seen["lookups"] == ["machine"] * (len(THERE) - 1)
    assert {*seen["saves"]} <= {"durable", "in memory", "machine"}
    assert seen["trained"]
    assert seen["after"] == ["hit"] * len(THERE)
    assert seen["again"] == ["durable"] * len(sizes)
    assert seen["found"] == ["hit"] * len(sizes)
    assert seen["remaining"] == 0
    lines = new_machine(lookup_timeout_s=LONG_S).run(["check", [*THERE, *sizes]])
    assert [line.split()[0] for line in lines] == ["hit"] * (len(THERE) + len(sizes))


NO_DESCRIPTORS = """
    import json, os, resource, sys
    from s3cache import Cache
    from s3cache.cache import Hit, Saved
    from tests.support.worker import entry

    options, there, ours, size = json.loads(sys.argv[1])
    cache = Cache.open(**options)
    assert isinstance(cache.lookup(there[0]), Hit)  # creates the client
    assert cache.flush(20).complete
    entries = {key: entry(key, size) for key in ours}
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
    held = []
    try:
        while True:
            held.append(os.dup(0))  # uses all free descriptors
    except OSError:
        pass
    saved = {key: cache.save(key, data) for key, data in entries.items()}
    found = {key: cache.lookup(key) for key in there[1:]}
    report = cache.flush(2)
    seen = {
        "durable": [key for key, each in saved.items() if isinstance(each, Saved) and each.durable],
        "in memory": sum(isinstance(each, Saved) and not each.durable for each in saved.values()),
        "refused": [str(each.reason) for each in saved.values() if not isinstance(each, Saved)],
        "lookups": [str(getattr(each, "reason", "hit")) for each in found.values()],
        "remaining": report.remaining,
    }
    print(json.dumps(seen), flush=True)
    """


@slow
@needs_proc
def test_a_process_without_free_descriptors_continues(new_machine: NewMachine) -> None:
    """Lookups miss with the reason, saves wait in memory, and the process ends without an error."""
    new_machine().run(["save", THERE, SMALL], ["flush", LONG_S])
    machine = new_machine(lookup_timeout_s=LONG_S, exit_timeout_s=2.0)
    seen, stderr = run(NO_DESCRIPTORS, machine, THERE, LITTLE, SMALL)
    assert seen == {
        "durable": [],
        "in memory": len(LITTLE),
        "refused": [],
        "lookups": ["machine"] * (len(THERE) - 1),
        "remaining": len(LITTLE),
    }
    assert "Too many open files" in stderr
    assert f"lost: {len(LITTLE)}" in stderr  # none of them was reported as durable
    assert machine.run(["check", THERE], ["flush", LONG_S])[-1] == "flushed 0"
    assert machine.leftovers() == []
