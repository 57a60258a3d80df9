"""A process at its real limit of descriptors: it goes on, and is told that this is the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import LONG_S
from tests.support.worker import keys

if TYPE_CHECKING:
    from tests.support.served import NewMachine

REPOSITORY = Path(__file__).parents[2]
THERE, OURS = keys(0, 3, "there"), keys(0, 5, "ours")
SIZE = 20_000

SCRIPT = """
    import json, os, resource, sys
    from s3cache import Cache, Hit, Saved
    from tests.support.worker import entry

    options, there, ours, size = json.loads(sys.argv[1])
    cache = Cache.open(**options)
    assert isinstance(cache.lookup(there[0]), Hit)  # the client is made
    assert cache.flush(20).complete
    entries = {key: entry(key, size) for key in ours}
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
    held = []
    try:
        while True:
            held.append(os.dup(0))  # whatever is free below
    except OSError:
        pass
    saved = {key: cache.save(key, data) for key, data in entries.items()}
    found = {key: cache.lookup(key) for key in there[1:]}
    report = cache.flush(2)
    told = {
        "durable": [key for key, each in saved.items() if isinstance(each, Saved) and each.durable],
        "in memory": sum(isinstance(each, Saved) and not each.durable for each in saved.values()),
        "refused": [str(each.reason) for each in saved.values() if not isinstance(each, Saved)],
        "lookups": [str(getattr(each, "reason", "hit")) for each in found.values()],
        "remaining": report.remaining,
    }
    print(json.dumps(told), flush=True)
    """


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there is no /proc to measure by")
def test_without_a_descriptor_to_be_had_all_goes_on(new_machine: NewMachine) -> None:
    """Lookups say what is wanting, saves wait in memory, and the process ends well."""
    new_machine().run(["save", THERE, SIZE], ["flush", LONG_S])
    machine = new_machine(lookup_timeout_s=LONG_S, exit_timeout_s=2.0)
    arguments = [machine.options, THERE, OURS, SIZE]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), json.dumps(arguments)],
        cwd=REPOSITORY,
        env={**machine.environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert told == {
        "durable": [],
        "in memory": len(OURS),
        "refused": [],
        "lookups": ["machine"] * (len(THERE) - 1),
        "remaining": len(OURS),
    }
    assert "Too many open files" in done.stderr
    assert f"lost: {len(OURS)}" in done.stderr  # which nobody was promised
    assert machine.run(["check", THERE], ["flush", LONG_S])[-1] == "flushed 0"
    assert machine.leftovers() == []
