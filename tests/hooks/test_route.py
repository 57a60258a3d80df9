"""The number of files that a hit and a miss run through: a symptom to watch."""

from __future__ import annotations

import pytest

from benchmarks.route import routes
from tests.support.marks import slow

pytestmark = pytest.mark.timeout(900)


@slow
def test_a_hit_and_a_miss_run_through_few_files() -> None:
    """A reader who follows a lookup opens these files; ``make route`` prints them."""
    found = routes()
    assert len(found["hit"].stops) <= 35, str(found["hit"])
    assert len(found["miss"].stops) <= 40, str(found["miss"])
