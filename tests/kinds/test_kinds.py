"""Every kind of graph is compiled by one machine and hit by the next, and does what eager does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from tests.kinds.jobs import ROWS, load_cases
from tests.support.machines import Machine, remote_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.kinds.case import Case

CASES = load_cases()
SHARED = [name for name, case in CASES.items() if case.graphs]
PROCESS_TIMEOUT_S = 900
TORCH = tuple(map(int, version("torch").split(".")[:2]))

# All cases run in four processes, which the first tests of each kind wait for.
pytestmark = pytest.mark.timeout(2 * PROCESS_TIMEOUT_S)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What all the cases came to on the machine named ``first`` or ``second``."""
    root = tmp_path_factory.mktemp("kinds")
    results: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        if name == "second":
            run("first")
        if name not in results:
            results[name] = _run(root, name)
        return results[name]

    return run


def _run(root: Path, name: str) -> dict[str, Any]:
    """All cases, half of them in each of two processes that share nothing."""

    def share(half: int) -> dict[str, Any]:
        names = [each for each in list(CASES)[half::2] if name == "first" or each in SHARED]
        remote = remote_url(root / f"bucket-{half}")
        # Headers are worth precompiling where much is compiled.
        precompile = str(int(name == "first"))
        machine = Machine(
            root / f"{name}-{half}", TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=precompile
        )
        outcome = machine.run(
            "tests.kinds.jobs:run",
            names,
            remote,
            remote=remote,
            timeout_s=PROCESS_TIMEOUT_S,
        )
        return dict(outcome.result)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(share, range(2))
    return first | second


def _case(name: str) -> Case:
    if not CASES[name].since <= TORCH <= CASES[name].until:
        pytest.skip("torch {}.{} has such a graph refused, or fails".format(*TORCH))
    return CASES[name]


@pytest.mark.parametrize("name", CASES)
def test_compiled_and_shared(name: str, ran: Callable[[str], dict[str, Any]]) -> None:
    case, found = _case(name), ran("first")[name]
    assert not found["error"], found["error"]
    assert found["differs"] == []
    assert found["shown"], found["entries"]
    assert _counts(found) == {
        "hits": 0,
        "misses": case.graphs + case.unsaved,
        "saved": case.graphs,
        "bypassed": case.bypassed,
    }
    assert found["counts"]["reasons"] == sorted(case.reasons)


@pytest.mark.parametrize("name", SHARED)
def test_hit_on_an_empty_disk(name: str, ran: Callable[[str], dict[str, Any]]) -> None:
    case, found = _case(name), ran("second")[name]
    assert not found["error"], found["error"]
    assert found["differs"] == []
    assert _counts(found) == {
        "hits": case.graphs,
        "misses": case.unsaved,
        "saved": 0,
        "bypassed": case.bypassed,
    }
    assert found["counts"]["reasons"] == sorted(case.reasons)
    if not case.bypassed + case.unsaved:
        assert found["lowered"] == 0
        assert found["started"] == []
    assert found["torch"]["autograd_cache_hit"] == case.graphs


def _counts(found: dict[str, Any]) -> dict[str, int]:
    return {name: found["counts"][name] for name in ("hits", "misses", "saved", "bypassed")}


def test_every_row_of_the_design_has_cases() -> None:
    assert {case.row for case in CASES.values()} == set(ROWS)
