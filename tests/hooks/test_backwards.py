"""A hit's backward is the one that its own program would lower, whoever lowered the entry's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.marks import slow

if TYPE_CHECKING:
    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@slow
def test_a_backward_under_other_settings_is_lowered_again(site: Site) -> None:
    """Once for all machines: the second level keeps it."""
    strict = site.machine("alone").run("guard_programs:backward", "memory://alone", True)
    first = site.machine("first").run("guard_programs:backward", site.url)
    assert strict["grad"] != first["grad"]
    assert first["saved"] == 1

    same = site.machine("same").run("guard_programs:backward", site.url)
    assert (same["hits"], same["anew"], same["grad"]) == (1, 0, first["grad"])

    for name, second_hits in (("other", 0), ("another", 1)):
        found = site.machine(name).run("guard_programs:backward", site.url, True)
        assert (found["hits"], found["anew"], found["uncompiled"]) == (1, 1, 0)
        assert found["grad"] == strict["grad"]
        assert found["second level hits"] == second_hits


@slow
def test_a_backward_hits_where_settings_are_those_of_the_entry(site: Site) -> None:
    first = site.machine("first").run("guard_programs:backward", site.url, True)
    same = site.machine("same").run("guard_programs:backward", site.url, True)
    assert (same["hits"], same["anew"], same["grad"]) == (1, 0, first["grad"])
    other = site.machine("other").run("guard_programs:backward", site.url)
    assert (other["hits"], other["anew"]) == (1, 1)
    assert other["grad"] != first["grad"]


@slow
def test_a_graph_that_is_kept_may_be_hit(site: Site) -> None:
    """torch refuses to keep a graph whose code reuses the memory of what was saved for it."""
    reusing = ("", False, "times")
    freed = site.machine("first").run("guard_programs:backward", site.url, False, False, *reusing)
    kept = site.machine("second").run("guard_programs:backward", site.url, False, True, *reusing)
    assert (kept["hits"], kept["anew"]) == (1, 1)
    assert kept["grad"] == [
        pytest.approx([2 * each for each in row], rel=1e-4) for row in freed["grad"]
    ]


@slow
def test_a_backward_that_is_lowered_again_keeps_nodes_without_inputs(site: Site) -> None:
    """Zeros, a seed: not once, when the graph is read, and put in as constants."""
    sliced = (False, "", False, "sliced")
    strict = site.machine("alone").run("guard_programs:backward", "memory://alone", True, *sliced)
    site.machine("first").run("guard_programs:backward", site.url, False, *sliced)
    other = site.machine("other").run("guard_programs:backward", site.url, True, *sliced)
    assert (other["hits"], other["anew"], other["uncompiled"]) == (1, 1, 0)
    assert other["grad"] == strict["grad"]


@slow
def test_options_of_compile_are_no_other_settings(site: Site) -> None:
    """They hold for the backward, which is called outside of them."""
    arguments = (False, False, "", True)
    first = site.machine("first").run("guard_programs:backward", site.url, *arguments)
    second = site.machine("second").run("guard_programs:backward", site.url, *arguments)
    assert (second["hits"], second["anew"], second["grad"]) == (1, 0, first["grad"])


@slow
@pytest.mark.parametrize("fault", ["settings_digest", "_new_trace"])
def test_a_backward_that_cannot_be_lowered_again_runs_uncompiled(site: Site, fault: str) -> None:
    site.machine("first").run("guard_programs:backward", site.url)
    strict = site.machine("alone").run("guard_programs:backward", "memory://alone", True)
    found = site.machine("second").run("guard_programs:backward", site.url, True, False, fault)
    assert (found["hits"], found["uncompiled"]) == (1, 1)
    for row, expected in zip(found["grad"], strict["grad"], strict=True):
        assert row == pytest.approx(expected, rel=1e-2, abs=5e-3)


@slow
def test_inputs_that_overlap_later_are_compiled_again(site: Site) -> None:
    """As without a cache: and the next machine hits both."""
    first = site.machine("first").run("guard_programs:overlapping", site.url)
    assert (first["right"], first["hits"], first["saved"]) == (True, 0, 2)
    second = site.machine("second").run("guard_programs:overlapping", site.url)
    assert (second["right"], second["hits"], second["saved"]) == (True, 2, 0)
    # And without what an entry notes this would be wrong.
    assert not site.machine("third").run("guard_programs:overlapping", site.url, True)["right"]
