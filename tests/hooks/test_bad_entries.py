"""An entry that cannot be used is a miss with a reason, is set aside, and is replaced."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


def test_bad_entries_are_misses_and_are_replaced(site: Site) -> None:
    """Kernels that do not load, pickles that are none, graphs that cannot be rebuilt.

    Every frame is sound: its digests were made by whoever made the damage.
    """
    writer = site.machine("writer")
    written = writer.run("graphs:write_and_damage", site.url)
    count = len(written["objects"])
    assert written["wrong"] == []
    assert written["saved"] == count == len(site.entries()) == 8
    damaged = {path: path.read_bytes() for path in site.entries()}

    # The compiler's products are at hand: this is not about compiling.
    warm = {"TORCHINDUCTOR_CACHE_DIR": str(writer.root / "inductor")}
    victim = site.machine("victim").run("graphs:all_of_them", site.url, **warm)
    assert victim["wrong"] == []
    assert victim["hits"] == {"local": 0, "remote": 0}
    assert victim["misses"] == {"corrupt": count}
    assert victim["torch"]["autograd_cache_miss"] == victim["saved"] == count
    assert "autograd_cache_hit" not in victim["torch"]
    assert victim["time_saved_s"] == 0
    assert "an entry cannot be used and is set aside" in victim["stderr"]
    assert all(path.read_bytes() != bad for path, bad in damaged.items())

    traces = site.root / "traces"
    third = site.machine("third").run(
        "graphs:all_of_them", site.url, PATH="", TORCH_TRACE=str(traces)
    )
    assert third["wrong"] == []
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
