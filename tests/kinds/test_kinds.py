"""Every kind of graph is compiled by one machine and hit by the next, and does what eager does.

``make test`` has one case of each kind, ``make test-all`` those that are nearly the same as well:
training beside inference, two features in one graph.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from tests.kinds.jobs import ROWS, load_cases
from tests.support.density import cases, selected
from tests.support.machines import Machine, remote_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kinds.case import Case

CASES = load_cases()
DENSE = {name for name, case in CASES.items() if case.dense}
PROCESS_TIMEOUT_S = 1200
TORCH = tuple(map(int, version("torch").split(".")[:2]))

# All cases run in two processes, which the first test of each machine waits for.
pytestmark = pytest.mark.timeout(2 * PROCESS_TIMEOUT_S)


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What the cases came to on the machine named ``first`` or ``second``."""
    root = tmp_path_factory.mktemp("kinds")
    chosen = selected(request, "name")
    names = {
        "first": [name for name in CASES if name in chosen],
        "second": [name for name in CASES if name in chosen],
    }
    results: dict[str, dict[str, Any]] = {}

    def run(machine: str) -> dict[str, Any]:
        if machine == "second":
            run("first")
        if machine not in results:
            results[machine] = _run(root, machine, names[machine])
        return results[machine]

    return run


def _run(root: Path, machine: str, names: list[str]) -> dict[str, Any]:
    """The cases one after the other in a process of the machine."""
    remote = remote_url(root)
    # Headers are worth precompiling where much is compiled.
    precompile = str(int(machine == "first"))
    outcome = Machine(root / machine, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=precompile).run(
        "tests.kinds.jobs:run", names, remote, remote=remote, timeout_s=PROCESS_TIMEOUT_S
    )
    return dict(outcome.result)


def _case(name: str) -> Case:
    if not CASES[name].since <= TORCH <= CASES[name].until:
        pytest.skip("torch {}.{} has such a graph refused, or fails".format(*TORCH))
    return CASES[name]


@pytest.mark.parametrize("name", cases(CASES, dense_ones=DENSE))
def test_compiled_and_shared(name: str, ran: Callable[[str], dict[str, Any]]) -> None:
    case, found = _case(name), ran("first")[name]
    assert not found["error"], found["error"]
    assert found["differs"] == []
    assert found["shown"], found["entries"]
    assert [entry["wrong"] for entry in found["entries"] if entry["wrong"]] == []
    assert _counts(found) == {
        "hits": case.again,
        "misses": case.graphs + case.unsaved,
        "saved": case.graphs,
        "half_hits": 0,
        "halves": case.halves,
        "bypassed": case.bypassed,
    }
    assert found["counts"]["reasons"] == sorted(case.reasons)


@pytest.mark.parametrize("name", cases(CASES, dense_ones=DENSE))
def test_hit_on_an_empty_disk(name: str, ran: Callable[[str], dict[str, Any]]) -> None:
    """Whatever can be cached anywhere is not compiled again."""
    case, found = _case(name), ran("second")[name]
    assert not found["error"], found["error"]
    assert found["differs"] == []
    assert _counts(found) == {
        "hits": case.graphs + case.again,
        "misses": case.unsaved,
        "saved": 0,
        "half_hits": case.halves,
        "halves": 0,
        "bypassed": case.bypassed,
    }
    assert found["counts"]["reasons"] == sorted(case.reasons)
    assert found["lowered"] == case.lowered
    if not case.lowered:
        assert found["started"] == []
    assert found["torch"].get("autograd_cache_hit", 0) == case.graphs + case.again


def _counts(found: dict[str, Any]) -> dict[str, int]:
    names = ("hits", "misses", "saved", "half_hits", "halves", "bypassed")
    return {name: found["counts"][name] for name in names}


def test_every_row_of_the_design_has_cases() -> None:
    """Also where the dense ones do not run."""
    assert {case.row for case in CASES.values() if not case.dense} == set(ROWS)
