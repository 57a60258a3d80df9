"""A hit's backward is the one that its own program would lower."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


def test_dynamo_traces_no_function_of_s3cache_when_a_backward_is_lowered_late(site: Site) -> None:
    """Torch calls the hooks while the compiled program runs, and Dynamo sees what runs then."""
    frames = site.machine("one").run("healing:count_frames", site.url)
    assert frames["hit"] < frames["miss"] <= frames["alone"]


@slow
def test_a_backward_is_lowered_under_the_settings_of_its_own_program(site: Site) -> None:
    """If they differ from the entry's, it is lowered again: once for all machines (second level).

    Options of ``torch.compile`` are no such difference: they apply to the backward too. A backward
    that is lowered again keeps nodes without inputs (zeros, a seed). If lowering fails, it runs
    uncompiled. A graph that is kept for a second backward may be a hit, although torch refuses to
    keep a graph with a backward that reuses the memory of saved tensors.
    """
    names = [
        *("strict", "first", "same", "other", "another", "broken settings", "broken trace"),
        *("first strict", "same strict", "other plain", "options", "same options"),
        *("freed", "kept", "sliced strict", "sliced", "sliced other"),
    ]
    strict, sliced, times = {"casts": True}, {"program": "sliced"}, {"program": "times"}
    steps: list[dict[str, Any]] = [
        {"site": "alone", **strict},
        *({"site": "a"}, {"site": "a"}, {"site": "a", **strict}, {"site": "a", **strict}),
        {"site": "a", **strict, "fault": "settings_digest"},
        {"site": "a", **strict, "fault": "new_trace"},
        *({"site": "b", **strict}, {"site": "b", **strict}, {"site": "b"}),
        *({"site": "c", "options": True}, {"site": "c", "options": True}),
        *({"site": "d", **times}, {"site": "d", **times, "kept": True}),
        {"site": "sliced alone", **sliced, **strict},
        *({"site": "e", **sliced}, {"site": "e", **sliced, **strict}),
    ]
    remote = f"file://{site.root}/remotes"
    ran = site.machine("one").run("guard_programs:backwards", remote, steps)
    found: dict[str, Any] = dict(zip(names, ran, strict=True))

    def outcome(name: str) -> tuple[int, int, int]:
        return found[name]["hits"], found[name]["again"], found[name]["uncompiled"]

    assert found["strict"]["grad"] != found["first"]["grad"]
    assert found["first"]["saved"] == 1
    for name, first in (
        ("same", "first"),
        ("same strict", "first strict"),
        ("same options", "options"),
    ):
        assert outcome(name) == (1, 0, 0), name
        assert found[name]["grad"] == found[first]["grad"]
    for name, second_hits in (("other", 0), ("another", 1)):
        assert outcome(name) == (1, 1, 0), name
        assert found[name]["grad"] == found["strict"]["grad"]
        assert found[name]["second level hits"] == second_hits
    assert outcome("other plain") == (1, 1, 0)
    assert found["other plain"]["grad"] != found["first strict"]["grad"]
    assert outcome("kept") == (1, 1, 0)
    twice = [pytest.approx([2 * each for each in row], rel=1e-4) for row in found["freed"]["grad"]]
    assert found["kept"]["grad"] == twice
    assert outcome("sliced other") == (1, 1, 0)
    assert found["sliced other"]["grad"] == found["sliced strict"]["grad"]
    for name in ("broken settings", "broken trace"):
        assert (found[name]["hits"], found[name]["uncompiled"]) == (1, 1), name
        for row, expected in zip(found[name]["grad"], found["strict"]["grad"], strict=True):
            assert row == pytest.approx(expected, rel=1e-2, abs=5e-3)


@slow
def test_ranks_lower_backwards_early_without_an_effect_on_the_program(site: Site) -> None:
    """The rank that compiles saves the whole graph before it continues.

    It still gets the backward for its own settings, or for a graph that is kept: that backward is
    lowered at its first call, as without s3cache. So is a backward that cannot be lowered early.
    """
    names = ("first", "same", "strict", "strict hit", "freed", "kept", "kept hit", "late")
    strict, times = {"casts": True}, {"program": "times"}
    steps: list[dict[str, Any]] = [
        *({"site": "a"}, {"site": "a"}),
        *({"site": "b", **strict}, {"site": "b", **strict}),
        *({"site": "c", **times}, {"site": "d", **times, "kept": True}),
        *({"site": "d", **times, "kept": True}, {"site": "e", "late": True}),
    ]
    rank = site.machine("one", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", RANK="0")
    ran = rank.run("guard_programs:backwards", f"file://{site.root}/remotes", steps)
    found: dict[str, Any] = dict(zip(names, ran, strict=True))

    def outcome(name: str) -> tuple[int, int, int, int]:
        step = found[name]
        return step["hits"], step["saved"], step["lowered"], step["again"]

    assert outcome("first") == (0, 1, 2, 0)
    assert outcome("same") == (1, 0, 0, 0)
    assert found["same"]["grad"] == found["first"]["grad"]
    assert outcome("strict") == (0, 1, 3, 0)
    assert outcome("strict hit")[:2] == (1, 0)
    assert found["strict hit"]["grad"] == found["strict"]["grad"] != found["first"]["grad"]
    assert outcome("freed") == (0, 1, 2, 0)
    assert outcome("kept") == (0, 1, 3, 0)
    twice = [pytest.approx([2 * each for each in row], rel=1e-4) for row in found["freed"]["grad"]]
    assert found["kept"]["grad"] == twice
    assert found["kept hit"]["grad"] == twice
    assert outcome("late") == (0, 1, 2, 0)
    assert found["late"]["grad"] == found["first"]["grad"]
