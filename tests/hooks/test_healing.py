"""An entry with code that raises at its first call is set aside, and the call is answered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from s3cache.hooks._rebuild import Inputs, has_storage
from tests.support.marks import nightly, selected, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

NOTE = "raised at its first call (RuntimeError: this code is broken)"

WHOLE: dict[str, Any] = {"program": "plain", "kinds": ["aot"]}
#: By name, the arguments of ``healing:calls``. A process runs all of them.
CASES: dict[str, dict[str, Any]] = {
    "training": {**WHOLE, "grad": True},
    "inference": WHOLE,
    "backward": {**WHOLE, "grad": True, "backward": True},
    "FX graph": {"program": "unknown"},
    "FX graph in a whole graph": {"program": "unknown", "reader": "known"},
    "FX graph of a backward": {"program": "unknown", "grad": True, "backward": True},
    "random": {**WHOLE, "program": "random", "last": True},
    "adding": {**WHOLE, "program": "adding", "last": True},
    "own error": {**WHOLE, "program": "looking_up", "line": "pass", "value": 1000.0},
    "read-only": {**WHOLE, "mode": "read-only", "machines": ["first", "first"]},
    "recalled": {**WHOLE, "recall": "on"},
}


@pytest.fixture(scope="module")
def calls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    site = Site(tmp_path_factory.mktemp("healing"))
    chosen = {name: CASES[name] for name in CASES if name in selected(request, "case")}
    return site.machine("one").run("healing:calls_of", f"file://{site.root}", chosen)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("training", "a"),
        pytest.param("backward", "a", marks=slow),
        pytest.param("inference", "a", marks=nightly),
        pytest.param("random", "a", marks=slow),  # its first code has drawn some before it raises
        pytest.param("FX graph", "f", marks=slow),
        pytest.param("FX graph in a whole graph", "f", marks=slow),
        pytest.param("FX graph of a backward", "", marks=nightly),
    ],
)
def test_a_graph_that_raises_is_compiled_again(calls: Any, case: str, kind: str) -> None:
    """The call is answered, the hit counts as a miss, and the next machine hits a sound entry."""
    ran = calls[case]
    first, second = ran["first"], ran["second"]
    assert ran["right"]
    assert first["outcomes"] == second["outcomes"] == [True] * 3
    (warning,) = first["warnings"]
    assert NOTE in warning
    assert "deleted from the bucket" in warning
    assert kind not in ran["stays"]
    assert second["warnings"] == []
    if kind == "a":
        assert first["misses"]["corrupt"] == 1
        assert sum(first["hits"].values()) == 0
        assert sum(second["hits"].values()) == 1


@pytest.mark.parametrize("case", ["adding"])
def test_a_call_that_changed_its_input_is_not_repeated(calls: Any, case: str) -> None:
    """Its error passes with a note; the entry is set aside, and the next call works."""
    ran = calls[case]
    first, second = ran["first"]["outcomes"], ran["second"]["outcomes"]
    kind, text, *notes = first[0]
    assert (kind, text) == ("RuntimeError", "this code is broken")
    assert all(NOTE in note for note in notes)
    assert first[1:] == [True, True]
    assert second == [True] * 3
    assert "a" not in ran["stays"]


@pytest.mark.parametrize("case", ["own error"])
def test_the_programs_own_error_leaves_the_entry_alone(calls: Any, case: str) -> None:
    ran = calls[case]
    for machine in (ran["first"], ran["second"]):
        assert all(each[0] in ("IndexError", "RuntimeError") for each in machine["outcomes"])
        assert machine["warnings"] == []
        assert sum(machine["hits"].values()) == 1
    assert "a" in ran["stays"]


@slow
@pytest.mark.parametrize("case", ["read-only"])
def test_a_machine_that_may_not_write_remembers_which_entry_raised(calls: Any, case: str) -> None:
    """The same local tier: the second process does not use the entry, and says nothing."""
    ran = calls[case]
    assert ran["first"]["outcomes"] == [True] * 3
    assert ran["first"]["warnings"] == []
    assert ran["first"]["misses"] == {"corrupt": 1}
    assert "a" in ran["stays"]


@pytest.mark.needs("recall")
@slow
@pytest.mark.parametrize("case", ["recalled"])
def test_an_entry_of_a_recalled_frame_is_replaced_although_its_call_fails(
    calls: Any, case: str
) -> None:
    """The graph is not at hand, so the first call fails; later calls and machines work."""
    ran = calls[case]
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
