"""Every kind of graph is compiled by one machine and hit by the next, and does what eager does.

Nor does any start slower than with torch alone: in a second process on one disk, or elsewhere.

``make test`` has one case of each kind, ``make test-all`` those that are nearly the same as well:
training beside inference, two features in one graph. What starts slower than with torch alone is
looked for in ``make test-all``, and among the slow cases at night.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from tests.kinds.jobs import ROWS, load_cases
from tests.support import beside
from tests.support.machines import Machine, remote_url
from tests.support.marks import cases, selected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tests.kinds.case import Case

CASES = load_cases()
DENSE = {name for name, case in CASES.items() if case.slow}
PROCESS_TIMEOUT_S = 3600  # for what hangs: hundreds of cases take long on a busy machine
TORCH = tuple(map(int, version("torch").split(".")[:2]))

# All cases run in a few processes, which the first test of each machine waits for.
pytestmark = pytest.mark.timeout(3 * PROCESS_TIMEOUT_S)


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What the cases came to on the machine named ``first``, ``second`` or ``alone``.

    And, with ``again``, in a second process there. On the one named ``alone`` s3cache is off.
    """
    root = tmp_path_factory.mktemp("kinds")
    chosen, compared = selected(request, "name"), selected(request, "program")
    names = {
        "first": [name for name in CASES if name in chosen | compared],
        "alone": [name for name in CASES if name in compared],
    }
    names["second"] = names["first"]
    names["first again"] = names["alone again"] = names["alone"]
    earlier = {"second": "first", "first again": "first", "alone again": "alone"}
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, Exception] = {}

    def run(process: str) -> dict[str, Any]:
        if process in earlier:
            run(earlier[process])
        if process in failed:  # run again, it would find what the first time has left
            raise failed[process]
        if process not in results:
            try:
                results[process] = _run(root, process.partition(" ")[0], names[process])
            except Exception as error:
                failed[process] = error
                raise
        return results[process]

    return run


def _run(root: Path, machine: str, names: list[str]) -> dict[str, Any]:
    """The cases one after the other in a process of the machine."""
    remote = remote_url(root)
    # Headers are worth precompiling where much is compiled.
    precompile = str(int(machine != "second" and len(names) > 9))
    place = Machine(root / machine, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=precompile)
    if machine == "alone":
        outcome = place.run("tests.kinds.jobs:run_alone", names, timeout_s=PROCESS_TIMEOUT_S)
    else:
        outcome = place.run(
            "tests.kinds.jobs:run", names, remote, remote=remote, timeout_s=PROCESS_TIMEOUT_S
        )
    return dict(outcome.result)


def _case(name: str) -> Case:
    if not CASES[name].since <= TORCH <= CASES[name].until:
        pytest.skip("torch {}.{} has such a graph refused, or fails".format(*TORCH))
    return CASES[name]


@pytest.mark.parametrize("name", cases(CASES, slow_ones=DENSE))
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


@pytest.mark.parametrize("name", cases(CASES, slow_ones=DENSE))
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


def _compared(names: Iterable[str], known: dict[str, str]) -> Any:
    programs = beside.parameters(names, known, slow_ones=CASES, nightly_ones=DENSE)
    return pytest.mark.parametrize("program", programs)


@_compared(CASES, beside.SAME_DISK["kinds"])
def test_a_second_process_starts_as_fast_as_with_torch_alone(
    program: str, ran: Callable[[str], dict[str, Any]]
) -> None:
    _case(program)
    ours, alone = (beside.Started.of(ran(each)[program]) for each in ("first again", "alone again"))
    assert beside.worse(ours, alone) == []


@_compared(
    [name for name in CASES if name not in beside.NEVER_WARM["kinds"]], beside.ELSEWHERE["kinds"]
)
def test_an_empty_disk_is_warm_or_it_is_said_why(
    program: str, ran: Callable[[str], dict[str, Any]]
) -> None:
    _case(program)
    found = ran("second")[program]
    counts = found["counts"]
    started = beside.Started.of(found)
    assert beside.not_warm(started, counts["reasons"]) == []


def _counts(found: dict[str, Any]) -> dict[str, int]:
    names = ("hits", "misses", "saved", "half_hits", "halves", "bypassed")
    return {name: found["counts"][name] for name in names}


def test_every_row_of_the_design_has_cases() -> None:
    """Also where the slow ones do not run."""
    assert {case.row for case in CASES.values() if not case.slow} == set(ROWS)
