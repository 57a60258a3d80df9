"""``s3cache bench`` measures a bucket, and leaves nothing there if it may delete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import Call
from tests.support.gate import Gate, refusing
from tests.support.marks import slow
from tests.support.shelves import Shelf


def test_storage_is_measured_and_what_was_written_is_removed_or_said_to_stay(
    call: Call, shelf: Shelf, at: Callable[[int], str], moto_port: int
) -> None:
    arguments = ("bench", "--storage-only", "--size", "100KB", "--timeout", "20s")
    found = call(*arguments, "--url", at(moto_port), "--json").json
    assert list(found["storage"]) == ["small_put", "small_get", "miss", "large_put", "large_get"]
    for name, times in found["storage"].items():
        assert times["seconds"], name
        assert times["median_s"] > 0
    large = found["storage"]["large_get"]
    assert large["mb_s"] == pytest.approx(large["bytes"] / large["median_s"] / 1e6)
    assert found["left"] == 0
    # One of each put, and as many small and large ones more as there was time for.
    assert found["removed"] == sum(
        len(found["storage"][name]["seconds"]) for name in ("small_put", "large_put")
    )
    with Gate(moto_port) as narrow:
        narrow.rule = refusing("DELETE")
        done = call(*arguments, "--url", at(narrow.port))
    assert done.code == 0
    assert "left below s3cache-bench-" in done.out
    assert "large get" in done.out


@slow
@pytest.mark.timeout(300)
def test_a_first_step_is_compiled_and_then_hit_by_a_fresh_process(
    call: Call, shelf: Shelf, tmp_path: Path
) -> None:
    done = call("bench", "--url", f"{shelf.url}?create=1", "--rounds", "1", "--json")
    assert done.code == 0, done.err
    start = done.json["warm_start"]
    assert (start["hits"], start["misses"], start["to_upload"]) == (1, {}, 0)
    assert start["ratio"] == pytest.approx(start["cold"]["median_s"] / start["warm"]["median_s"])
    assert shelf.names == set()
    assert not (tmp_path / "local").exists()
