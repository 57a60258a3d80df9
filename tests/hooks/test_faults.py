"""A bug in s3cache costs a warning, never the user's program; strict mode raises it.

Only ``make test-all`` tests strict mode.
"""

from __future__ import annotations

import pytest

from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

HOOKS = ("key", "fx key", "lookup", "candidate", "rebuild", "save", "describe")
# Notes about a compile; an entry without them is never used.
NOTES = ("begin", "note fx", "note")
# torch keeps the graph in its own cache, and hits it there when s3cache works again.
MISS = {"torch miss": 1, "torch saved": 1, "miss fx": 2}


@slow
def test_without_strict_mode_no_fault_reaches_the_program(site: Site) -> None:
    """With a fault in any hook, results equal eager mode's, and the next compile works."""
    ran = site.machine("one").run("faults:faults", site.url, False)
    found, steps = ran["found"], ran["steps"]
    for name in (*HOOKS, *NOTES):
        assert found[name] is True, name
        assert found[name + " after"] is True, name
    for name in NOTES:
        assert "saved" not in steps[name]  # torch may keep it in its own directory
        assert steps[name + " after"]["saved"] == 1
    assert ran["stderr"].count("InjectedError: injected") >= 1

    # torch caches the graph under its own key.
    assert steps["key"] == {**MISS, "bypass": 1}
    assert steps["key after"]["saved"] == 1
    # The second level fails; the whole graph is saved anyway.
    assert steps["fx key"] == {**MISS, "miss": 1, "saved": 1}
    assert steps["lookup"] == {**MISS, "saved": 1}
    # An entry that could not be used is replaced by the fresh one.
    assert steps["candidate"] == steps["rebuild"] == {**MISS, "miss": 1, "saved": 1}
    assert steps["candidate after"] == steps["rebuild after"] == {"hit": 1, "torch hit": 1}
    for name in ("save", "describe"):
        assert steps[name] == {**MISS, "miss": 1}
        # torch has kept the graph that s3cache could not save.
        assert steps[name + " after"] == {"miss": 1, "torch hit": 1}


@slow
def test_strict_mode_raises_every_fault_and_every_bypass(site: Site) -> None:
    """It raises nothing else: the compile after each fault works."""
    machine = site.machine("one")
    found = machine.run("faults:faults", site.url, True)["found"]
    for name in (*HOOKS, "begin", "note"):
        assert found[name].endswith(" True"), name
        assert found[name + " after"] is True, name
    ran = machine.run("faults:bypassed", site.url)
    assert ["opaque" in message for message in ran["raised"]] == [True, True]
    assert ran["product"] is True
    assert ran["reasons"] == {"function": 2}
