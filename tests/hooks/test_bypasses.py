"""A graph that is not cached is told once for each kind of reason, with a way out that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.density import dense

if TYPE_CHECKING:
    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@dense
def test_the_first_of_a_kind_is_a_warning_and_its_line_when_pasted_works(site: Site) -> None:
    """The second one is told at INFO; after what the warning says, the same graph is cached."""
    ran = site.machine("one").run("bypasses:ways_out", site.url)
    assert ran.pop("stderr").count("Traceback") == 0
    assert len(ran) == 5
    for code, told in ran.items():
        assert told["levels"] == ["WARNING", "INFO"], code
        assert told["lines"] == 1, code
        assert told["before"] == [{code: 2}, 0]
        assert told["after"] == [{code: 2}, 1]


@dense
def test_where_torch_looks_nothing_up_check_tells_the_way_out(site: Site) -> None:
    assert site.machine("one").run("bypasses:caches_off") == "caches-off"
