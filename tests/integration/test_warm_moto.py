"""A real ``torch.compile`` run on two machines that share a bucket: one cold, one warm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from s3cache.store import S3Options
from tests.support.machines import Machine


@pytest.mark.timeout(900)
def test_a_second_machine_starts_warm(s3_options: S3Options, tmp_path: Path) -> None:
    """It compiles nothing, and its result equals that of the first machine bit by bit."""
    place = s3_options
    environment = {
        "AWS_ACCESS_KEY_ID": str(place.access_key),
        "AWS_SECRET_ACCESS_KEY": str(place.secret_key),
    }
    url = f"s3://{place.bucket}/{place.prefix}"
    options = {"endpoint_url": place.endpoint_url, "region": place.region}
    cold, warm = (
        Machine(tmp_path / name, **environment)
        .run(f"{__name__}:run", remote=url, settings=options, server=server)
        .result
        for name, server in (("cold", 0), ("warm", 1))
    )
    assert cold["lowered"] > 0
    assert (cold["misses"], cold["hits"]) == (1, 0)
    assert (warm["misses"], warm["hits"], warm["lowered"]) == (0, 1, 0)
    assert warm["result"] == cold["result"]


def run() -> dict[str, Any]:
    """Call a small compiled function."""
    import torch

    from tests.support.watch import Watch

    compiled = torch.compile(lambda x: x.sin() + 1)
    found = Watch().around(lambda: {"result": compiled(torch.linspace(-1, 1, 24)).tolist()})
    return {**found, **found["counts"]}
