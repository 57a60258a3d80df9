"""Whatever is wrong around the cache, a program trains as it would without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hooks.training import FAULTS
from tests.support.marks import slow

if TYPE_CHECKING:
    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

# Far more than any fault may cost: torch has the graph on its own disk.
LONGEST_S = 60


@slow
def test_losses_and_gradients_are_the_same_under_each_fault(site: Site) -> None:
    came_to = site.machine("one").run("training:under_faults", str(site.remote))
    stderr = came_to.pop("stderr")
    last = came_to.pop("none")
    assert set(came_to) == set(FAULTS)
    for name, told in came_to.items():
        assert told["right"], (name, told, stderr)
        assert told["seconds"] < LONGEST_S, (name, told)
        assert sum(told["hits"].values()) == 0 or name in STILL_HITS, (name, told)
    assert "machine" in came_to["there is no memory for the entry"]["misses"]
    # And what was damaged on the way is not what others get.
    assert sum(last["hits"].values()) == 1, last


# Faults that leave lookups alone.
STILL_HITS = {"the disk is full", "no thread can start"}
