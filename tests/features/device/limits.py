"""A graph whose code may contain the number of a rank, with and without the feature."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import s3cache
from s3cache import seam
from s3cache.torch_api import internals


def outcome(url: str, *, knows_limits: bool, limited: bool = True) -> dict[str, Any]:
    """Compile a graph; return its lookups and saves. ``limited``: its code may hold a rank."""
    every = seam.features()
    some = tuple(each for each in every if knows_limits or each.name != "device")
    groups = (0, 2, "groups") if limited else None
    place = "s3cache.features.device.moving"
    with (
        mock.patch("s3cache.hooks._session.features", return_value=some),
        mock.patch.object(internals, "is_in_job", return_value=limited),
        mock.patch.object(internals, "process_groups", return_value=groups),
        mock.patch(f"{place}.collectives_in", return_value={"a collective": 1}),
        s3cache.enabled(url, mode="read-write" if limited else "read-only") as cache,
    ):
        result = torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
        assert torch.equal(result, torch.ones(3).sin() + 1)
        cache.flush(60)
        stats = cache.stats()
        run = cache.engine.recorded()
        records = [each for each in run.records if each.kind == "aot"]
    return {
        "hits": sum(stats.hits.values()),
        "saved": stats.saved,
        "bypasses": dict(stats.bypass_reasons),
        "rejected": [why for each in records for why in each.rejected],
    }


def saves_without(url: str) -> dict[str, Any]:
    return outcome(url, knows_limits=False)


def saves_with(url: str) -> dict[str, Any]:
    return outcome(url, knows_limits=True)


def reads_with(url: str) -> dict[str, Any]:
    return outcome(url, knows_limits=True, limited=False)


def reads_without(url: str) -> dict[str, Any]:
    return outcome(url, knows_limits=False, limited=False)
