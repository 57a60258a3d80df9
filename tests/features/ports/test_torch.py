"""A second machine finds measurements and profiles of sizes in torch's own remote caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from s3cache.testing import Outcome
from tests.support.machines import Machine, remote_url
from tests.support.marks import nightly, slow

pytestmark = pytest.mark.timeout(600)


def run(root: Path, name: str, job: str, *arguments: Any, **environment: str) -> Outcome:
    url = remote_url(root)
    return Machine(root / name, **environment).run(
        f"tests.features.ports.torch_jobs:{job}",
        *arguments,
        remote=url,
        server={"one": 0, "two": 1}.get(name, 2),
    )


@slow
def test_measurements_are_found_on_the_same_device_only(tmp_path: Path) -> None:
    """torch's key for a winner is the same for all devices. Without a device nothing is shared."""
    assert run(tmp_path, "one", "winner", "H100").result == {"found": None, "hits": 0}
    assert run(tmp_path, "two", "winner", "H100").result == {"found": 4, "hits": 1}
    assert run(tmp_path, "three", "winner", "A100").result == {"found": None, "hits": 0}
    assert run(tmp_path, "four", "winner", "").result == {"found": None, "hits": 0}


@slow
def test_a_profile_of_sizes_is_found(tmp_path: Path) -> None:
    """The second machine compiles once, for all sizes."""
    variables = {"TORCH_COMPILE_JOB_ID": "job", "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO": "1"}
    first = run(tmp_path, "one", "sizes", **variables)
    second = run(tmp_path, "two", "sizes", **variables)
    assert (first.result, second.result) == (2, 1)
    assert second.stats.kinds["torch"].hits["remote"] == 1


@nightly
def test_a_configured_redis_server_stays_in_use(tmp_path: Path) -> None:
    seen = run(tmp_path, "one", "backends", TORCHINDUCTOR_REDIS_HOST="localhost")
    assert seen.result == [True, True, True]
    assert run(tmp_path, "two", "backends").result == [False, False, False]
