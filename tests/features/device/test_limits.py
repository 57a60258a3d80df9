"""Code that may contain the number of a rank is never used by a process that cannot tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

import s3cache
from s3cache import seam
from s3cache.torch_api import internals
from tests.support.machines import Machine, remote_url
from tests.support.marks import slow


@torch._inductor.config.patch(fallback_by_default=True)  # so that no C++ is compiled
def _outcome(url: str, knows_limits: bool, limited: bool) -> dict[str, Any]:
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


def _run(root: Path, number: int, *, knows_limits: bool, limited: bool = True) -> dict[str, Any]:
    """Compile on a machine, in a fork of the server with its number."""
    job = f"{__name__}:_outcome", remote_url(root), knows_limits, limited
    outcome: dict[str, Any] = Machine(root / f"{number}").run(*job, server=number).result
    return outcome


def test_a_result_with_unknown_limits_is_not_saved(tmp_path: Path) -> None:
    outcome = _run(tmp_path, 0, knows_limits=False)
    assert (outcome["hits"], outcome["saved"]) == (0, 0)
    assert outcome["bypasses"] == {"unrecorded": 1}


@slow
def test_an_entry_with_limits_is_a_miss_where_they_are_not_understood(tmp_path: Path) -> None:
    assert _run(tmp_path, 0, knows_limits=True)["saved"] == 1
    assert _run(tmp_path, 0, knows_limits=True)["hits"] == 1
    other = _run(tmp_path, 1, knows_limits=True, limited=False)
    assert other["hits"] == 0
    assert "its code may contain the number of rank 0 of 2" in other["rejected"][0]
    without = _run(tmp_path, 2, knows_limits=False, limited=False)
    assert without["hits"] == 0
    assert without["rejected"] == ["nothing here knows where its code can run"]
