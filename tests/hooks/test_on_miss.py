"""What a miss does: it waits, compiles at once, or is an error."""

from __future__ import annotations

from tests.support.sites import Site


def test_a_program_that_must_not_compile_ends_at_its_first_miss(site: Site) -> None:
    """And says which graph it was, which entry is the nearest, and what differs."""
    first = site.machine("first").run("on_miss:step", site.url, [8, 16], "wait")
    assert all(isinstance(each, float) for each in first)
    serving = site.machine("second")
    assert serving.run("on_miss:step", site.url, [8, 16], "error") == first
    found, missed = serving.run("on_miss:step", site.url, [8, 24], "error")
    assert found == first[0]
    assert "on_miss is error" in missed
    assert "on_miss.py:" in missed
    assert "nearest:" in missed
    assert "24" in missed
    (other,) = serving.run("on_miss:step", site.url, [8], "error", "tan")
    assert "tan" in other
    entries = len(site.entries())
    assert site.machine("third").run("on_miss:step", site.url, [24], "compile") != [missed]
    assert len(site.entries()) == entries + 1
