"""An entry that cannot be read without running code of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.density import dense

if TYPE_CHECKING:
    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@dense
def test_an_entry_that_would_run_users_code_while_it_is_read_is_not_saved(site: Site) -> None:
    """The outer graph is shared at the second level; the inner one, compiled alone, as a whole."""
    writer, reader = (
        site.machine(name).run("nested:compile_noted", site.url) for name in ("writer", "reader")
    )
    for found in (writer, reader):
        assert (found["result"], found["note"]) == ([3, 3, 3, 3], "a")
        assert found["bypass_reasons"] == {"entry": 1}
        assert "tests.hooks.nested.note" in found["stderr"]
    assert writer["misses"] == {"absent": 2}
    assert writer["saved"] == 1
    assert reader["misses"] == {"absent": 1}
    assert reader["hits"]["remote"] == 1
    assert reader["inductor"] == {"fxgraph_cache_hit": 1}
