"""A process that runs out of memory or descriptors continues, and no entry is blamed for it."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import slow
from tests.support.processes import Machine
from tests.support.scripts import python
from tests.support.served import NewMachine
from tests.support.waiting import LONG_S
from tests.support.worker import keys

REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20
LARGE, SMALL = 4 * MIB, 2_000
THERE, OURS, LITTLE = keys(0, 3, "there"), keys(0, 3, "ours"), keys(0, 5, "little")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


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


@pytest.mark.parametrize("left", [2 * MIB, pytest.param(64 << 10, marks=slow)])
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
