"""An entry with code that raises at its first call is set aside, and the call is answered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from s3cache.hooks._rebuild import Inputs, has_storage
from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

NOTE = "raised at its first call (RuntimeError: this code is broken)"


def _calls(site: Site, program: str, **options: Any) -> dict[str, Any]:
    ran: dict[str, Any] = site.machine("one").run(
        "healing:calls_with", f"file://{site.root}/{program}?create=1", program, options
    )
    assert ran["right"]
    return ran


def _check_healed(ran: dict[str, Any], kind: str) -> None:
    first, second = ran["first"], ran["second"]
    assert first["outcomes"] == second["outcomes"] == [True] * 3
    (warning,) = first["warnings"]
    assert NOTE in warning
    assert "deleted from the bucket" in warning
    assert kind not in ran["stays"]
    assert second["warnings"] == []


@pytest.mark.parametrize(
    "options",
    [
        {"grad": True},
        pytest.param({}, marks=slow),
        pytest.param({"grad": True, "backward": True}, marks=slow),
    ],
    ids=["training", "inference", "backward"],
)
def test_a_whole_graph_that_raises_is_compiled_again(site: Site, options: Any) -> None:
    """The call is answered, the hit counts as a miss, and the next machine hits a sound entry."""
    ran = _calls(site, "plain", kinds=["aot"], **options)
    _check_healed(ran, "a")
    assert ran["first"]["misses"]["corrupt"] == 1
    assert sum(ran["first"]["hits"].values()) == 0
    assert sum(ran["second"]["hits"].values()) == 1


@slow
@pytest.mark.parametrize("options", [{}, {"grad": True, "backward": True}])
def test_an_fx_graph_that_raises_is_compiled_again(site: Site, options: Any) -> None:
    _check_healed(_calls(site, "unknown", **options), "f" if not options else "")


@slow
def test_random_numbers_are_those_of_one_call(site: Site) -> None:
    """The first code has drawn some before it raises."""
    _check_healed(_calls(site, "random", kinds=["aot"], last=True), "a")


def test_a_call_that_changed_its_input_is_not_repeated(site: Site) -> None:
    """Its error passes with a note; the entry is set aside, and the next call works."""
    ran = _calls(site, "adding", kinds=["aot"], last=True)
    first, second = ran["first"]["outcomes"], ran["second"]["outcomes"]
    kind, text, *notes = first[0]
    assert (kind, text) == ("RuntimeError", "this code is broken")
    assert all(NOTE in note for note in notes)
    assert first[1:] == [True, True]
    assert second == [True] * 3
    assert "a" not in ran["stays"]


def test_the_programs_own_error_leaves_the_entry_alone(site: Site) -> None:
    ran = _calls(site, "looking_up", kinds=["aot"], line="pass", value=1000.0)
    for machine in (ran["first"], ran["second"]):
        assert all(each[0] in ("IndexError", "RuntimeError") for each in machine["outcomes"])
        assert machine["warnings"] == []
        assert sum(machine["hits"].values()) == 1
    assert "a" in ran["stays"]


@slow
def test_a_machine_that_may_not_write_remembers_which_entry_raised(site: Site) -> None:
    """The same local tier: the second process does not use the entry, and says nothing."""
    ran = _calls(site, "plain", kinds=["aot"], mode="read-only", machines=["first", "first"])
    assert ran["first"]["outcomes"] == [True] * 3
    assert ran["first"]["warnings"] == []
    assert ran["first"]["misses"] == {"corrupt": 1}
    assert "a" in ran["stays"]


@pytest.mark.needs("recall")
@slow
def test_an_entry_of_a_recalled_frame_is_replaced_although_its_call_fails(site: Site) -> None:
    """The graph is not at hand, so the first call fails; later calls and machines work."""
    ran = _calls(site, "plain", kinds=["aot"], recall="on")
    kind, *_ = ran["first"]["outcomes"][0]
    assert kind == "RuntimeError"
    assert ran["first"]["outcomes"][1:] == [True, True]
    assert ran["second"]["outcomes"] == [True] * 3


def test_inputs_without_storage_are_not_read() -> None:
    """A read would end the process. FSDP takes the storage of parameters away between uses."""
    matrix = torch.arange(6.0).reshape(2, 3)
    row, rows = matrix[1:], matrix.expand(4, 2, 3)
    kept = Inputs([matrix, row, rows], None)
    assert not kept.have_changed()
    assert all(map(has_storage, (matrix, row, rows, matrix.to_sparse(), torch.empty(0))))
    matrix.untyped_storage().resize_(0)
    assert not any(map(has_storage, (matrix, row, rows)))
    assert kept.have_changed()
    assert Inputs([matrix], None).have_changed()
