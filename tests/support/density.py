"""How much of each suite runs: a part of every one of them, or, with ``--all``, everything.

A case marked ``dense`` is one of many of its kind, and runs with ``--all`` only; so do all cases
but the last of a test that is marked ``sparse``. What is left out is said at the end of the run:
nobody should take a part for the whole. Hypothesis draws fewer examples without ``--all``; a test
that needs more or fewer than others asks for ``examples(times)``.

``--all --left`` runs what a run without ``--all`` has left: the dense cases, and again the tests
that do more then (those of Hypothesis, and what is marked ``scaled``). CI runs the two one after
the other, and no case twice.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from _pytest.mark import ParameterSet
    from xdist.workermanage import WorkerController

__all__ = ["cases", "dense", "examples", "scaled", "selected", "sparse"]

dense = pytest.mark.dense
scaled = pytest.mark.scaled
sparse = pytest.mark.sparse
_LEFT = pytest.StashKey[Counter[str]]()

# A busy machine is no fault of the code. CI draws the same examples each time, so that what it
# says is about the commit; everybody else searches on.
for _name, _examples in {"s3cache": 25, "s3cache-all": 100}.items():
    settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,
    )


def examples(times: float) -> int:
    """``max_examples`` for a test that needs ``times`` as many as the profile has for all."""
    return max(1, round(times * settings().max_examples))


def cases(names: Iterable[str], *, dense_ones: Container[str]) -> list[ParameterSet]:
    """Names as parameters, some of them marked as dense."""
    return [pytest.param(name, marks=[dense] if name in dense_ones else []) for name in names]


def selected(request: pytest.FixtureRequest, parameter: str) -> set[str]:
    """The values of a parameter with which the tests of this module will run.

    For fixtures that run many cases in one process: they need not run those that nobody asked for.
    """
    return {
        str(item.callspec.params[parameter])
        for item in request.session.items
        if item.path == request.path
        and isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and parameter in item.callspec.params
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the dense cases too (make test-all)")
    parser.addoption(
        "--left", action="store_true", help="of --all, only what is left when make test has run"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "dense: one of many of its kind; runs with --all only")
    config.addinivalue_line("markers", "scaled: does more with --all")
    config.addinivalue_line("markers", "sparse: all cases of each test but its last are dense")
    config.stash[_LEFT] = Counter()
    settings.load_profile("s3cache-all" if config.getoption("--all") else "s3cache")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    last = {_of_test(item): item for item in items}
    for item in items:
        if item.get_closest_marker("sparse") and last[_of_test(item)] is not item:
            item.add_marker(dense)
    if config.getoption("--all"):
        if config.getoption("--left"):
            done = [item for item in items if not _is_left(item)]
            items[:] = [item for item in items if _is_left(item)]
            config.hook.pytest_deselected(items=done)
        return
    left = [item for item in items if item.get_closest_marker("dense")]
    if left:
        items[:] = [item for item in items if not item.get_closest_marker("dense")]
        config.stash[_LEFT].update(item.path.parent.name for item in left)
        config.hook.pytest_deselected(items=left)


def _of_test(item: pytest.Item) -> str:
    """The test that it is a case of."""
    return item.nodeid.partition("[")[0]


def _is_left(item: pytest.Item) -> bool:
    """A run without ``--all`` leaves it, or does less of it."""
    drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return bool(drawn or any(map(item.get_closest_marker, ("dense", "scaled"))))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that writes the report, which collects nothing itself."""
    left = session.config.stash[_LEFT]
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left"] = dict(left)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """All workers collect the same, and leave out the same; one that was killed told nothing."""
    left: dict[str, int] = getattr(node, "workeroutput", {}).get("left", {})
    counts = Counter(left)
    if counts:
        node.config.stash[_LEFT] = counts


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left := config.stash[_LEFT]:
        parts = ", ".join(f"{count} of {suite}" for suite, count in sorted(left.items()))
        terminalreporter.write_line(f"left to make test-all: {left.total()} tests ({parts})")
