"""Equal devices find one entry, and what is loaded is what would be compiled there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu import standin
from tests.gpu.kinds import KINDS
from tests.support.machines import remote_url
from tests.support.marks import slow

pytestmark = pytest.mark.skipif(bool(standin.MISSING), reason=standin.MISSING)

#: Kinds of which the code holds the index in C++.
ALONE = {"cpp wrapper"}


def on(root: Path, index: int, remote: str, *names: str) -> dict[str, Any]:
    """What came of each kind on a machine where the device ``index`` is the current one."""
    where = remote_url(root / remote)
    machine = standin.machine(root / f"{remote} {index}", index=index, S3CACHE_URL=where)
    found: dict[str, Any] = machine.run("tests.gpu.kinds:run", *names).result
    return found


@pytest.mark.parametrize(
    "names",
    [
        ["training", "dynamic shapes", "reductions", "triton autotune", "cpp wrapper"],
        pytest.param(sorted(KINDS), marks=slow),
    ],
    ids=["some", "all"],
)
def test_what_was_made_for_one_device_serves_each_equal_one(
    names: list[str], tmp_path: Path
) -> None:
    on(tmp_path, 0, "shared", *names)
    moved = on(tmp_path, 3, "shared", *names)
    compiled = on(tmp_path, 3, "other", *names)
    for name in names:
        is_moved = name not in ALONE
        assert (moved[name]["hits"] + moved[name]["fx hits"] > 0) is is_moved, name
        assert ("ptxas" not in moved[name]) is is_moved, name
        for what in ("code", "launched"):
            assert moved[name][what] == compiled[name][what], (name, what)
        devices = {int(each.rsplit(" on ", 1)[1]) for each in moved[name]["launched"]}
        assert devices <= {3}, name
