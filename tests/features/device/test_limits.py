"""Code that may contain the number of a rank is never used by a process that cannot tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.machines import Machine, remote_url
from tests.support.marks import slow


def _outcome(root: Path, machine: str, *arguments: Any) -> dict[str, Any]:
    job = f"tests.features.device.limits:{'_'.join(arguments)}"
    found: dict[str, Any] = Machine(root / machine).run(job, remote_url(root)).result
    return found


def test_a_result_with_unknown_limits_is_not_saved(tmp_path: Path) -> None:
    found = _outcome(tmp_path, "one", "saves", "without")
    assert (found["hits"], found["saved"]) == (0, 0)
    assert found["bypasses"] == {"unrecorded": 1}


@slow
def test_an_entry_with_limits_is_a_miss_where_they_are_not_understood(tmp_path: Path) -> None:
    saved = _outcome(tmp_path, "one", "saves", "with")
    assert saved["saved"] == 1
    again = _outcome(tmp_path, "one", "saves", "with")
    assert again["hits"] == 1
    other = _outcome(tmp_path, "two", "reads", "with")
    assert other["hits"] == 0
    assert "its code may contain the number of rank 0 of 2" in other["rejected"][0]
    without = _outcome(tmp_path, "three", "reads", "without")
    assert without["hits"] == 0
    assert without["rejected"] == ["nothing here knows where its code can run"]
