"""A few runs of ``make test-fleet``: leaders die, stop, lose the network or are slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from tests.fleet.jobs import Outcome, Plan
from tests.fleet.run import run, table, train
from tests.fleet.worker import STEPS
from tests.support.marks import nightly, slow


def judge(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Check that no process hung or failed and no entry is lost or wrong; return all counts."""
    assert {each.number: each.bad for each in outcomes if each.bad} == {}, table(outcomes)
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
    return counts


def test_other_processes_end_and_no_entry_is_lost_if_a_leader_fails() -> None:
    """One leader is killed, one is stopped, and a node loses the network."""
    plans = [Plan.draw(number, 0).short() for number in (8, 18, 5)]
    assert len({plan.deed for plan in plans}) > 1
    counts = judge([*run(plans)])
    assert counts["mishaps"] >= len(plans)
    assert counts["waits"] > 0


@pytest.mark.parametrize(
    "numbers",
    [pytest.param(range(0, 30, 3), marks=slow), pytest.param(range(40), marks=nightly)],
    ids=["some", "all"],  # of the steps with each deed, on both places
)
def test_leaders_may_fail_at_each_step(numbers: range) -> None:
    """Some waits reach the bound, as a leader stops for longer."""
    plans = [Plan.draw(number, 1) for number in numbers]
    counts = judge([*run(plans, 10)])
    assert counts["mishaps"] >= 0.8 * len(plans)
    assert counts["to the bound"] > 0


@nightly
@pytest.mark.timeout(1800)
def test_jobs_of_torch_have_the_losses_of_torch_alone() -> None:
    pytest.importorskip("torch")
    counts = judge([*train(range(2 * len(STEPS)), 2)])
    assert counts["mishaps"] > len(STEPS)
    assert counts["waits"] > 0
