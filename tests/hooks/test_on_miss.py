"""A miss waits, compiles at once, or is an error."""

from __future__ import annotations

from tests.support.marks import slow
from tests.support.sites import Site


def test_a_program_that_must_not_compile_ends_at_its_first_miss(site: Site) -> None:
    """The error names the graph, the nearest entry, and the difference."""
    first = site.machine("first").run("on_miss:step", site.url, [8], "wait")
    assert isinstance(first[0], float)
    found, missed = site.machine("second").run("on_miss:step", site.url, [8, 24], "error")
    assert found == first[0]
    assert "on_miss is error" in missed
    assert "on_miss.py:" in missed
    assert "nearest:" in missed
    assert "24" in missed


@slow
def test_the_error_names_the_operator_that_differs(site: Site) -> None:
    site.machine("first").run("on_miss:step", site.url, [8], "compile")
    (other,) = site.machine("second").run("on_miss:step", site.url, [8], "error", "tan")
    assert "tan" in other
    assert len(site.entries()) == 1
