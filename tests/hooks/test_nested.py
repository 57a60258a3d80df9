"""A compile inside of a compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.density import dense

if TYPE_CHECKING:
    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@dense
def test_a_compile_that_comes_inside_of_another_takes_nothing_from_it(site: Site) -> None:
    """Both hit, although the inner one is looked up while the outer one's entry is unpickled."""
    writer = site.machine("writer").run("nested:compile_noted", site.url)
    assert writer["misses"] == {"absent": 2}
    assert writer["saved"] == 2
    reader = site.machine("reader").run("nested:compile_noted", site.url)
    for found in (writer, reader):
        assert (found["result"], found["note"]) == ([3, 3, 3, 3], "a")
        assert found["bypassed"] == 0
    assert reader["misses"] == {}
    assert reader["hits"]["remote"] == 2
    assert reader["torch"]["autograd_cache_hit"] == sum(reader["hits"].values())
