"""The stand-in is available, and a process on it sees the GPUs that a test chose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.gpu import standin
from tests.support.marks import slow


@pytest.mark.skipif("CI" not in os.environ, reason="only CI has to have a stand-in")
def test_ci_skips_no_test_of_the_stand_in() -> None:
    assert standin.MISSING in ("", standin.WITH_CUDA)


@slow
@pytest.mark.skipif(bool(standin.MISSING), reason=standin.MISSING)
def test_a_process_sees_the_gpus_of_its_machine(tmp_path: Path) -> None:
    machine = standin.machine(tmp_path, "A100", index=3, GPU_MULTI_PROCESSOR_COUNT="7")
    assert machine.run("tests.support.gpu.kinds:devices").result == {
        "count": 8,
        "current": 3,
        "name": "NVIDIA A100-SXM4-80GB",
        "capability": [8, 0],
        "multiprocessors": 7,
        "tensor": "cuda:3",
    }
