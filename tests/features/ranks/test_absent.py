"""Where ranks must agree on hits and cannot, each lookup misses: a hit would hang others."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.machines import Machine, remote_url

pytestmark = pytest.mark.timeout(300)


def _outcomes(url: str) -> list[tuple[str, int, dict[str, int]]]:
    """Compile a graph again and again; return hits and misses of each time."""
    import torch

    import s3cache
    from s3cache import seam
    from s3cache.torch_api import internals

    every = seam.features()
    others = tuple(each for each in every if each.name != "ranks")
    found: list[tuple[str, int, dict[str, int]]] = []

    def compiled(name: str, features: Any, *, fails: bool = False, must: bool = True) -> None:
        torch.compiler.reset()
        error = RuntimeError("of the feature") if fails else None
        with (
            mock.patch("s3cache.hooks._session.features", return_value=features),
            mock.patch.object(internals, "hits_need_agreement", return_value=must),
            mock.patch("s3cache.features.ranks.agreement.agreement_on", side_effect=error),
            s3cache.enabled(url) as cache,
        ):
            x = torch.ones(3, 3)
            assert torch.equal(torch.compile(lambda a: a @ a)(x), x @ x)
            cache.flush(60)
            stats = cache.stats()
        misses = {str(reason): count for reason, count in stats.misses.items()}
        found.append((name, sum(stats.hits.values()), misses))

    compiled("saves", others, must=False)
    compiled("hits", others, must=False)
    compiled("without the feature", others)
    compiled("feature fails", every, fails=True)
    return found


def test_a_lookup_misses_where_no_feature_can_ask_the_other_ranks(tmp_path: Path) -> None:
    job = f"{__name__}:_outcomes"
    outcomes = Machine(tmp_path).run(job, remote_url(tmp_path), server=0).result
    found = {name: tuple(rest) for name, *rest in outcomes}
    assert found["saves"][0] == 0
    assert found["hits"] == (1, {})
    assert found["without the feature"] == (0, {"disabled": 1})
    assert found["feature fails"] == (0, {"ranks": 1})
