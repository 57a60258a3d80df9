"""``s3cache bench`` measures a bucket, and leaves nothing there if it may delete."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.commands import Call
from tests.support.gate import Gate, refusing


def test_storage_is_measured_and_what_was_written_is_removed_or_said_to_stay(
    call: Call, at: Callable[[int], str], moto_port: int
) -> None:
    found = call("bench", "--url", at(moto_port), "--json").json
    assert list(found["storage"]) == ["small_put", "small_get", "miss", "large_put", "large_get"]
    assert all(times["median_s"] > 0 for times in found["storage"].values())
    large = found["storage"]["large_get"]
    assert large["mb_s"] == pytest.approx(large["bytes"] / large["median_s"] / 1e6)
    written = sum(len(found["storage"][name]["seconds"]) for name in ("small_put", "large_put"))
    assert (found["removed"], found["left"]) == (written, 0)
    with Gate(moto_port) as narrow:
        narrow.rule = refusing("DELETE")
        done = call("bench", "--url", at(narrow.port))
    assert done.code == 0
    assert "left below s3cache-bench/" in done.out
    assert "large get" in done.out
