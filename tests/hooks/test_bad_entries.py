"""An entry that cannot be used is a miss with a reason, is set aside, and is replaced."""

from __future__ import annotations

import json

import pytest

from tests.hooks.tracing import traced
from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@slow
def test_bad_entries_are_misses_and_are_replaced(site: Site) -> None:
    """Kernels that do not load, invalid pickles, graphs that cannot be rebuilt.

    Every frame is valid: the damage is inside, under correct digests.
    """
    traces = site.root / "traces"
    machine = site.machine("one", TORCH_TRACE=str(traces))
    ran = machine.run("graphs:damaged_and_replaced", site.url)
    writer, reader, third = (ran[name] for name in ("writer", "reader", "third"))
    assert writer["wrong"] == reader["wrong"] == third["wrong"] == []
    count = writer["saved"]
    assert count == len(site.entries()) == 8

    assert reader["hits"] == {"local": 0, "remote": 0}
    assert reader["misses"] == {"corrupt": count}
    assert reader["torch"]["autograd_cache_miss"] == reader["saved"] == count
    assert "autograd_cache_hit" not in reader["torch"]
    assert "an entry cannot be used and is set aside" in ran["stderr"]
    assert ran["replaced"]

    assert third["hits"] == {"local": 0, "remote": count}
    assert third["torch"]["autograd_cache_hit"] == count
    assert third["time_saved_s"] > 0

    # torch's trace of a hit, for tlparse and people.
    keys = {path.name.partition(".")[0] for path in site.entries()}
    artifacts = [line for line in traced(traces) if "artifact" in line]
    named = [each for each in artifacts if each["artifact"]["name"] == "aotautograd_cache_hit"]
    found = [json.loads(each["payload"]) for each in named]
    assert {each["key"] for each in found} == keys
    assert sum(each["time_saved_ms"] for each in found) == pytest.approx(
        third["time_saved_s"] * 1000, abs=2 * count
    )
