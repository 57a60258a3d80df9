"""An entry that cannot be used is a miss with a reason, is set aside, and is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@slow
def test_bad_entries_are_misses_and_are_replaced(site: Site) -> None:
    """Kernels that do not load, pickles that are none, graphs that cannot be rebuilt.

    Every frame is sound: the damage is inside, under digests that are right.
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
    assert reader["time_saved_s"] == 0
    assert "an entry cannot be used and is set aside" in ran["stderr"]
    assert ran["replaced"]

    assert third["hits"] == {"local": 0, "remote": count}
    assert third["torch"]["autograd_cache_hit"] == count
    assert third["time_saved_s"] > 0

    # What torch traces of a hit, for tlparse and people.
    keys = {path.name.partition(".")[0] for path in site.entries()}
    found = _artifacts(traces, "aotautograd_cache_hit")
    assert {each["key"] for each in found} == keys
    assert sum(each["time_saved_ms"] for each in found) == pytest.approx(
        third["time_saved_s"] * 1000, abs=2 * count
    )


def _artifacts(traces: Path, name: str) -> list[dict[str, Any]]:
    """The payloads of all structured trace artifacts called ``name``."""
    found = []
    for path in traces.iterdir():
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if f'"name": "{name}"' in line:
                payload = []
                while len(lines) > number + 1 and lines[number + 1].startswith("\t"):
                    number += 1
                    payload.append(lines[number])
                found.append(json.loads("\n".join(payload)))
    return found
