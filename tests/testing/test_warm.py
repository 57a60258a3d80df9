"""``assert_warm_start`` checks that the second machine compiled nothing and has equal results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from s3cache.stats import CacheStats, Counters, LevelStats, Reason
from s3cache.testing import Outcome, assert_warm_start
from tests.support.machines import Machine
from tests.support.marks import slow

HIT = replace(
    Counters().read(CacheStats, local=None, pending=0, breaker="none", remote={}, fx=LevelStats()),
    hits={"remote": 1},
)
WARM = Outcome("job", 0, "loss 1\n", "", recorded=HIT)


@slow
@pytest.mark.timeout(900)
def test_a_well_cached_job_passes_and_the_one_that_compiled_does_not(tmp_path: Path) -> None:
    """The job has a smaller last batch, a forward without a backward, and compiled autograd."""
    url = f"file://{tmp_path / 'remote'}?create=1"

    def run(server: int, job: str = "train") -> Outcome:
        machine = Machine(tmp_path / f"{server}-{job}")
        return machine.run(f"tests.testing.warm_job:{job}", url, server=server)

    first, second = run(0), run(1)
    assert second.stats.misses  # misses alone are no reason to fail
    assert_warm_start(first, second)
    with pytest.raises(AssertionError, match=r"compiled on the second machine: .* missed"):
        assert_warm_start(second, first)

    off = run(2, "train_without_caches")
    with pytest.raises(AssertionError, match=r"with torch's caches off \(fx-graph-cache-off\)"):
        assert_warm_start(first, off)
    none = run(2, "train_none")
    with pytest.raises(AssertionError, match="hit nothing"):
        assert_warm_start(first, none)


def test_a_bypass_counts_only_if_no_level_has_the_graph() -> None:
    known = replace(
        HIT, bypassed=1, bypass_reasons={"function": 1}, fx=LevelStats(hits={"remote": 2})
    )
    assert_warm_start(WARM, replace(WARM, recorded=known))
    unknown = replace(known, fx=LevelStats(bypassed=1, bypass_reasons={"custom-operator": 1}))
    with pytest.raises(AssertionError, match=r"1 FX graph cannot be cached \(custom-operator\)"):
        assert_warm_start(WARM, replace(WARM, recorded=unknown))


def test_the_error_names_pending_uploads_of_the_first_machine() -> None:
    missed = replace(HIT, fx=LevelStats(misses={Reason.ABSENT: 2}))
    slow = replace(WARM, recorded=replace(HIT, pending=3))
    with pytest.raises(AssertionError, match=r"2 FX graphs missed[^$]*3 still to upload"):
        assert_warm_start(slow, replace(WARM, recorded=missed))


def test_outputs_or_selected_parts_of_them_must_be_equal() -> None:
    other = replace(WARM, stdout="loss 2\n")
    with pytest.raises(AssertionError, match=r"-loss 1\n\+loss 2"):
        assert_warm_start(WARM, other)
    assert_warm_start(WARM, other, same=lambda outcome: outcome.stdout.split()[0])
    with pytest.raises(AssertionError, match="something else"):
        assert_warm_start(replace(WARM, result=[1.0]), replace(WARM, result=[1.5]))
