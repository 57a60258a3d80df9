"""What is compiled for a GPU that is not there is found by the next machine, with its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import standin
from tests.support.machines import remote_url

pytestmark = pytest.mark.skipif(bool(standin.MISSING), reason=standin.MISSING)


def test_a_machine_with_a_gpu_hits_and_assembles_nothing(tmp_path: Path) -> None:
    first, second = (
        standin.machine(tmp_path / name, S3CACHE_URL=remote_url(tmp_path)).run("tests.gpu.jobs:mlp")
        for name in ("first", "second")
    )
    assert first.stats.saved == 1
    assert first.result["ptxas"] == 12
    assert sum(second.stats.hits.values()) == 1
    assert "ptxas" not in second.result
