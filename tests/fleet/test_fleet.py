"""A few of the runs of ``make test-fleet``: leaders die, stop, lose the network and are slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from tests.fleet.jobs import Outcome, Plan
from tests.fleet.run import run, table, train
from tests.fleet.steps import STEPS
from tests.support.marks import nightly, slow


def judge(outcomes: Sequence[Outcome]) -> Counter[str]:
    """Let nothing hang, be lost, wrong or fail; return how often something happened."""
    assert {each.number: each.bad for each in outcomes if each.bad} == {}, table(outcomes)
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
    return counts


def test_whatever_happens_to_one_that_leads_the_others_end_and_nothing_is_lost() -> None:
    """One is killed, one is stopped, and a node loses the network."""
    plans = [Plan.draw(number, 0, wires=False) for number in (8, 18, 5)]
    plans = [plan.short() for plan in plans]
    assert len({plan.deed for plan in plans}) > 1
    counts = judge([*run(plans)])
    assert counts["mishaps"] >= len(plans)
    assert counts["waits"] > 0


@slow
def test_so_it_is_at_each_step() -> None:
    """Half of the kinds; among them waits to the bound, as a leader was stopped for longer."""
    plans = [Plan.draw(number, 1) for number in range(20)]
    counts = judge([*run(plans, 10)])
    assert counts["mishaps"] >= 15
    assert counts["to the bound"] > 0


@nightly
@pytest.mark.timeout(1800)
def test_jobs_of_torch_come_to_the_losses_of_torch_alone() -> None:
    pytest.importorskip("torch")
    counts = judge([*train(range(2 * len(STEPS)), 2)])
    assert counts["mishaps"] > len(STEPS)
    assert counts["waits"] > 0
