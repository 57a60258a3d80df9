"""One machine compiles each kind of graph, the next one hits it, and results equal those of eager.

No program starts slower than with torch alone. ``make test`` runs one case of each kind. ``make
test-all`` adds a third of the similar cases (training beside inference, two features in one graph),
and ``make test-nightly`` runs all of them.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.equal.cases import Case, load_cases
from tests.support.machines import Machine, remote_url
from tests.support.marks import cases, nightly, selected

CASES = load_cases()
SLOW = {name for name, case in CASES.items() if case.slow}
NIGHTLY = SLOW.difference(sorted(SLOW)[1::3])  # there are too many similar cases for one run
PROCESS_TIMEOUT_S = 3600  # against hangs: hundreds of cases take long on a busy machine
TORCH = tuple(map(int, version("torch").split(".")[:2]))

# All cases run in a few processes. The first test of each machine waits for them.
pytestmark = pytest.mark.timeout(3 * PROCESS_TIMEOUT_S)
each_case = pytest.mark.parametrize("name", cases(CASES, slow_ones=SLOW, nightly_ones=NIGHTLY))


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return the results of all cases on the machines ``first`` and ``second``.

    Only ``make test-nightly``, which runs all cases, generates C++ for each.
    """
    root = tmp_path_factory.mktemp("kinds")
    names = [name for name in CASES if name in selected(request, "name")]
    native = len(names) == len(CASES)
    return {each: _run(root, each, names, native=native) for each in ("first", "second")}


def _run(
    root: Path, machine: str, names: list[str], *, alone: bool = False, native: bool = True
) -> dict[str, Any]:
    """Run the cases one after the other in a process of the machine; ``alone`` without s3cache."""
    remote = None if alone else remote_url(root)
    outcome = Machine(root / machine).run(
        *("tests.equal.cases:run", names, remote, native),
        remote=remote,
        timeout_s=PROCESS_TIMEOUT_S,
        server={"first": 0, "second": 1}.get(machine),
    )
    return dict(outcome.result)


def _checked(name: str, found: dict[str, Any], **counts: int) -> Case:
    """Check what both machines have in common, and the counts; return the case."""
    case = CASES[name]
    if case.since > TORCH:
        pytest.skip("torch {}.{} cannot cache such a graph".format(*TORCH))
    assert not found["error"], found["error"]
    assert found["differs"] == []
    assert (
        found["counts"]
        == {
            "hits": case.again,
            "misses": case.unsaved,
            "saved": 0,
            "half_hits": 0,
            "halves": 0,
            "bypassed": case.bypassed,
        }
        | counts
    )
    assert found["reasons"] == sorted(case.reasons)
    return case


@each_case
def test_the_first_machine_compiles_and_saves_a_graph(
    name: str, ran: dict[str, dict[str, Any]]
) -> None:
    case, found = CASES[name], ran["first"][name]
    saved = {"misses": case.graphs + case.unsaved, "saved": case.graphs, "halves": case.halves}
    _checked(name, found, half_hits=case.shared, **saved)
    assert found["shown"], found["entries"]
    assert [entry["wrong"] for entry in found["entries"] if entry["wrong"]] == []


@each_case
def test_a_second_machine_with_an_empty_disk_hits(
    name: str, ran: dict[str, dict[str, Any]]
) -> None:
    """Graphs that can be cached are not compiled again; bypasses of other graphs have reasons."""
    found, hits = ran["second"][name], CASES[name].graphs + CASES[name].again
    case = _checked(name, found, hits=hits, half_hits=CASES[name].halves)
    assert found["lowered"] == case.lowered
    if not case.lowered:
        assert found["started"] == []
    assert found["hits"] == hits


@nightly
def test_a_second_process_starts_no_slower_than_with_torch_alone(tmp_path: Path) -> None:
    names = [name for name in CASES if CASES[name].since <= TORCH]
    for _ in range(2):
        ours = _run(tmp_path, "ours", names)
        alone = _run(tmp_path, "alone", names, alone=True)
    started = ((_started(ours[name]), _started(alone[name]), name) for name in names)
    assert [each for each in started if each[0][0] > each[1][0] or each[0][1] > each[1][1]] == []


def _started(found: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of lowered graphs and of compiled C++ files."""
    # Compiler calls that torch makes once in a process belong to the first program only.
    return found["lowered"], sum(".cpp'" in each for each in found["started"])


def test_every_row_of_the_design_has_cases() -> None:
    """This is true without the slow cases."""
    assert {case.row for case in CASES.values() if not case.slow} == {
        case.row for case in CASES.values()
    }
