"""Every kind of graph is compiled by one machine and hit by the next, and does what eager does.

Nor does any start slower than with torch alone. ``make test`` has one case of each kind, ``make
test-all`` half of those that are nearly the same (training beside inference, two features in one
graph), and ``make test-nightly`` all of them.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.kinds.case import Case
from tests.kinds.jobs import ROWS, load_cases
from tests.support.machines import Machine, remote_url
from tests.support.marks import cases, nightly, selected

CASES = load_cases()
SLOW = {name for name, case in CASES.items() if case.slow}
NIGHTLY = set(sorted(SLOW)[::2])  # those that are nearly the same are too many for one run
PROCESS_TIMEOUT_S = 3600  # for what hangs: hundreds of cases take long on a busy machine
TORCH = tuple(map(int, version("torch").split(".")[:2]))

# All cases run in a few processes, which the first test of each machine waits for.
pytestmark = pytest.mark.timeout(3 * PROCESS_TIMEOUT_S)


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What the cases came to on the machines named ``first`` and ``second``."""
    root = tmp_path_factory.mktemp("kinds")
    names = [name for name in CASES if name in selected(request, "name")]
    return {machine: _run(root, machine, names) for machine in ("first", "second")}


def _run(root: Path, machine: str, names: list[str], *, alone: bool = False) -> dict[str, Any]:
    """Run the cases one after the other in a process of the machine; ``alone`` without s3cache."""
    remote = None if alone else remote_url(root)
    outcome = Machine(root / machine).run(
        *("tests.kinds.jobs:run", names, remote),
        remote=remote,
        timeout_s=PROCESS_TIMEOUT_S,
        server={"first": 0, "second": 1}.get(machine),
    )
    return dict(outcome.result)


def _case(name: str) -> Case:
    if CASES[name].since > TORCH:
        pytest.skip("torch {}.{} has such a graph refused".format(*TORCH))
    return CASES[name]


@pytest.mark.parametrize("name", cases(CASES, slow_ones=SLOW, nightly_ones=NIGHTLY))
def test_compiled_and_shared(name: str, ran: dict[str, dict[str, Any]]) -> None:
    case, found = _case(name), ran["first"][name]
    assert not found["error"], found["error"]
    assert found["differs"] == []
    assert found["shown"], found["entries"]
    assert [entry["wrong"] for entry in found["entries"] if entry["wrong"]] == []
    assert found["counts"] == {
        "hits": case.again,
        "misses": case.graphs + case.unsaved,
        "saved": case.graphs,
        "half_hits": 0,
        "halves": case.halves,
        "bypassed": case.bypassed,
    }
    assert found["reasons"] == sorted(case.reasons)


@pytest.mark.parametrize("name", cases(CASES, slow_ones=SLOW, nightly_ones=NIGHTLY))
def test_hit_on_an_empty_disk(name: str, ran: dict[str, dict[str, Any]]) -> None:
    """Whatever can be cached anywhere is not compiled again, and it is said why another is."""
    case, found = _case(name), ran["second"][name]
    assert not found["error"], found["error"]
    assert found["differs"] == []
    assert found["counts"] == {
        "hits": case.graphs + case.again,
        "misses": case.unsaved,
        "saved": 0,
        "half_hits": case.halves,
        "halves": 0,
        "bypassed": case.bypassed,
    }
    assert found["reasons"] == sorted(case.reasons)
    assert found["lowered"] == case.lowered
    if not case.lowered:
        assert found["started"] == []
    assert found["hits"] == case.graphs + case.again


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(sorted({*CASES} - SLOW), id="one of each kind", marks=nightly),
        pytest.param(sorted(SLOW), id="others", marks=nightly),
    ],
)
def test_no_second_process_starts_slower_than_with_torch_alone(
    names: list[str], tmp_path: Path
) -> None:
    names = [name for name in names if CASES[name].since <= TORCH]
    for _ in range(2):
        ours = _run(tmp_path, "ours", names)
        alone = _run(tmp_path, "alone", names, alone=True)
    for name in names:
        (lowered, compilers), (alone_lowered, alone_compilers) = map(
            _started, (ours[name], alone[name])
        )
        assert (lowered <= alone_lowered, compilers <= alone_compilers) == (True, True), name


def _started(found: dict[str, Any]) -> tuple[int, int]:
    """Graphs that were lowered, and files of C++ that were compiled."""
    # What torch asks of a compiler once in a process, it asks for whichever program is first.
    return found["lowered"], sum(".cpp'" in each for each in found["started"])


def test_every_row_of_the_design_has_cases() -> None:
    """Also where the slow ones do not run."""
    assert {case.row for case in CASES.values() if not case.slow} == set(ROWS)
