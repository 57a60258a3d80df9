"""A process that really runs out of memory: it goes on, and no entry is blamed for it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.marks import slow
from tests.support.waiting import LONG_S
from tests.support.worker import keys

if TYPE_CHECKING:
    from tests.support.served import NewMachine

REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20
LARGE, SMALL = 4 * MIB, 2_000
THERE, OURS, LITTLE = keys(0, 3, "there"), keys(0, 3, "ours"), keys(0, 5, "little")

SCRIPT = """
    import json, resource, sys
    from s3cache import Cache, Hit, Saved
    from tests.support.worker import entry

    options, there, ours, left = json.loads(sys.argv[1])
    whole = {key: entry(key, size) for key, size in ours.items()}
    cache = Cache.open(**options)
    first, *others = there
    assert isinstance(cache.lookup(first), Hit)  # the client is made, all is imported
    assert cache.flush(200).complete

    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
    held, size = [], 64 << 20
    while size >= left:
        try:
            held.append(bytes(size))  # what is free below the limit
        except MemoryError:
            size //= 2
    told, losses = {"lookups": [], "saves": []}, []

    def train():
        losses.append(sum(0.1 * each for each in range(1000)))

    def outcome(result):
        if isinstance(result, Hit):
            right = bytes(result.entry.data) == whole[result.entry.header.key]
            return "hit" if right else "WRONG"
        if isinstance(result, Saved):
            return "durable" if result.durable else "in memory"
        return str(result.reason)

    for key in others:
        told["lookups"].append(outcome(cache.lookup(key)))
        train()
    for key, data in [*whole.items()]:
        told["saves"].append(outcome(cache.save(key, data)))
        train()
    cache.flush(1)
    told["trained"] = len(losses) == len(others) + len(ours) and len({*losses}) == 1

    del held
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    whole.update({key: entry(key, size) for key, size in there.items()})
    told["after"] = [outcome(cache.lookup(key)) for key in there]
    told["again"] = [outcome(cache.save(key, whole[key])) for key in ours]
    told["found"] = [outcome(cache.lookup(key)) for key in ours]
    told["remaining"] = cache.flush(200).remaining
    print(json.dumps(told), flush=True)
    """


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is not enforced")
@pytest.mark.parametrize("left", [2 * MIB, pytest.param(64 << 10, marks=slow)])
def test_without_memory_all_goes_on(new_machine: NewMachine, left: int) -> None:
    """Nothing raises, and neither an entry nor the server is blamed: once there is memory again
    each lookup hits, and all that was saved is there."""
    new_machine().run(["save", THERE, LARGE], ["flush", LONG_S])
    machine = new_machine(lookup_timeout_s=LONG_S, exit_timeout_s=5.0, breaker_failures=1)
    sizes = {**dict.fromkeys(OURS, LARGE), **dict.fromkeys(LITTLE, SMALL)}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(SCRIPT),
            json.dumps([machine.options, dict.fromkeys(THERE, LARGE), sizes, left]),
        ],
        cwd=REPOSITORY,
        env={
            **machine.environment,
            "PYTHONPATH": str(REPOSITORY),
            # What is freed goes back at once, for the next to miss it.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": str(MIB // 2),
        },
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert told["lookups"] == ["machine"] * (len(THERE) - 1)
    assert {*told["saves"]} <= {"durable", "in memory", "machine"}
    assert told["trained"]
    assert told["after"] == ["hit"] * len(THERE)
    assert told["again"] == ["durable"] * len(sizes)
    assert told["found"] == ["hit"] * len(sizes)
    assert told["remaining"] == 0
    assert not (machine.tier / "quarantine").exists()
    lines = new_machine(lookup_timeout_s=LONG_S).run(["check", [*THERE, *sizes]])
    assert [line.split()[0] for line in lines] == ["hit"] * (len(THERE) + len(sizes))
