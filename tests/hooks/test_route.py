"""The number of files that a hit and a miss run through: a symptom to watch."""

from __future__ import annotations

import pytest

from benchmarks.route import Route, routes
from tests.support.marks import nightly

pytestmark = pytest.mark.timeout(900)


@nightly
def test_a_hit_and_a_miss_run_through_few_files_of_the_core() -> None:
    """A reader who follows a lookup opens these files; ``make route`` prints them."""
    found = routes()
    assert in_core(found["hit"]) <= 25, str(found["hit"])
    assert in_core(found["miss"]) <= 32, str(found["miss"])
    assert len(found["recall"].stops) <= 37, str(found["recall"])
    # No code of a feature that is not in use. A job notes what it uses for its profile.
    used = {stop.file for stop in found["hit"].stops if stop.file.startswith("features/")}
    assert used <= {"features/job_profile/profile.py"}


def in_core(route: Route) -> int:
    return sum(not stop.file.startswith("features/") for stop in route.stops)
