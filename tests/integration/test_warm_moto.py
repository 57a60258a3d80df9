"""A real ``torch.compile`` run on two machines that share a bucket: one cold, one warm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from s3cache.store import S3Options
from tests.support.machines import Machine

WIDTH = 24


@pytest.mark.timeout(900)
def test_a_second_machine_starts_warm(s3_options: S3Options, tmp_path: Path) -> None:
    """It compiles nothing, and its losses equal those of the first machine bit by bit."""
    place = s3_options
    environment = {
        "AWS_ACCESS_KEY_ID": str(place.access_key),
        "AWS_SECRET_ACCESS_KEY": str(place.secret_key),
    }
    url = f"s3://{place.bucket}/{place.prefix}"
    options = {"endpoint_url": place.endpoint_url, "region": place.region}
    cold, warm = (
        Machine(tmp_path / name, **environment)
        .run(f"{__name__}:train", remote=url, settings=options, server=server)
        .result
        for name, server in (("cold", 0), ("warm", 1))
    )
    assert cold["lowered"] > 0
    assert (cold["misses"], cold["hits"]) == (1, 0)
    assert (warm["misses"], warm["hits"], warm["lowered"]) == (0, 1, 0)
    assert warm["losses"] == cold["losses"]


def train() -> dict[str, Any]:
    """Take three steps with a small network."""
    import torch

    from tests.support.watch import Watch

    def steps() -> dict[str, Any]:
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        compiled = torch.compile(network)
        losses = []
        for step in range(3):
            x = torch.linspace(-1, 1 + step, 4 * WIDTH).reshape(4, WIDTH)
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses}

    found = Watch().around(steps)
    return {**found, **found["counts"]}
