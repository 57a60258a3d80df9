"""Equal devices share an entry, and load the code that they would compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu import standin
from tests.support.machines import remote_url
from tests.support.marks import slow

KINDS = "training", "flex attention", "coordinate descent"

pytestmark = [pytest.mark.skipif(bool(standin.MISSING), reason=standin.MISSING), slow]


def on(root: Path, index: int, remote: str, *names: str) -> dict[str, Any]:
    """Run kinds on a machine with the current device ``index``; return the reports."""
    where = remote_url(root / remote)
    machine = standin.machine(root / f"{remote} {index}", index=index, S3CACHE_URL=where)
    found: dict[str, Any] = machine.run("tests.support.gpu.kinds:run", *names).result
    return found


def test_an_entry_made_on_one_device_serves_equal_devices(tmp_path: Path) -> None:
    """``test_kinds.py`` moves every kind; these are compiled on the other device as well."""
    on(tmp_path, 0, "shared", *KINDS)
    moved = on(tmp_path, 3, "shared", *KINDS)
    compiled = on(tmp_path, 3, "other", *KINDS)
    for name in KINDS:
        assert moved[name]["hits"] + moved[name]["fx hits"] > 0, name
        assert moved[name]["compiled"] == 0, name
        assert "ptxas" not in moved[name], name
        assert moved[name]["code"], name
        # A compile also generates templates to choose from.
        assert set(moved[name]["code"]) <= set(compiled[name]["code"]), name
        assert moved[name]["launched"] == compiled[name]["launched"], name
        assert moved[name]["devices"] == [3], name
