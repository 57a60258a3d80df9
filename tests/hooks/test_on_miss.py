"""What a miss does: it waits, compiles at once, or is an error."""

from __future__ import annotations

from tests.support.marks import slow
from tests.support.sites import Site


def test_a_program_that_must_not_compile_ends_at_its_first_miss(site: Site) -> None:
    """And says which graph it was, which entry is the nearest, and what differs."""
    first = site.machine("first").run("on_miss:step", site.url, [8], "wait")
    assert isinstance(first[0], float)
    found, missed = site.machine("second").run("on_miss:step", site.url, [8, 24], "error")
    assert found == first[0]
    assert "on_miss is error" in missed
    assert "on_miss.py:" in missed
    assert "nearest:" in missed
    assert "24" in missed


@slow
def test_it_may_be_another_operator_that_misses(site: Site) -> None:
    site.machine("first").run("on_miss:step", site.url, [8], "compile")
    (other,) = site.machine("second").run("on_miss:step", site.url, [8], "error", "tan")
    assert "tan" in other
    assert len(site.entries()) == 1
