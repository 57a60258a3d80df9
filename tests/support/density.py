"""How much of each suite runs: ``make test``, ``make test-all`` or ``make test-nightly``.

A case marked ``dense`` is one of many of its kind, and runs with ``--all`` (``make test-all``) and
``--nightly``; so do all cases but the last of a test that is marked ``sparse``. A case marked
``nightly``, or ``dense`` or ``sparse`` with ``nightly=True``, runs with ``--nightly`` only: what
takes long, and what measures time or memory, which a slow machine must not fail. What is left out
is said at the end of the run, with the target that has it: a part is not to be taken for the whole.
Hypothesis draws fewer examples without ``--all``; a test that needs more or fewer than others asks
for ``examples(times)``.

``--all --left`` runs what a run without ``--all`` has left: the dense cases, and again the tests
that do more then (those of Hypothesis, and what is marked ``scaled``). ``--nightly --left`` runs
what one with ``--all`` has left. CI runs one after the other, and no case twice.
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

__all__ = ["cases", "dense", "examples", "nightly", "scaled", "selected", "sparse"]

dense = pytest.mark.dense
nightly = pytest.mark.dense(nightly=True)
scaled = pytest.mark.scaled
sparse = pytest.mark.sparse
_TARGETS = ("make test", "make test-all", "make test-nightly")
# By target and suite.
_LEFT = pytest.StashKey[Counter[tuple[str, str]]]()

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


def cases(
    names: Iterable[str], *, dense_ones: Container[str], nightly_ones: Container[str] = ()
) -> list[ParameterSet]:
    """Names as parameters, some of them marked as dense or left to the night."""
    return [
        pytest.param(
            name,
            marks=[nightly] if name in nightly_ones else [dense] if name in dense_ones else [],
        )
        for name in names
    ]


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
        "--nightly", action="store_true", help="run everything there is (make test-nightly)"
    )
    parser.addoption(
        "--left",
        action="store_true",
        help="of --all, only what is left when make test has run; of --nightly, make test-all",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "dense(nightly=False): one of many of its kind; runs with --all or --nightly only",
    )
    config.addinivalue_line("markers", "scaled: does more with --all")
    config.addinivalue_line(
        "markers", "sparse(nightly=False): all cases of each test but its last are dense"
    )
    config.stash[_LEFT] = Counter()
    config.option.all = config.option.all or config.option.nightly
    settings.load_profile("s3cache-all" if config.option.all else "s3cache")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    last = {_of_test(item): item for item in items}
    for item in items:
        sparsely = item.get_closest_marker("sparse")
        if sparsely and last[_of_test(item)] is not item:
            item.add_marker(pytest.mark.dense(**sparsely.kwargs))
    run = 2 if config.option.nightly else int(config.option.all)

    def chosen(item: pytest.Item) -> bool:
        level = _level(item)
        return level == run or (
            level < run and not (run and config.option.left and _done(item, run))
        )

    left = [item for item in items if not chosen(item)]
    if left:
        items[:] = [item for item in items if chosen(item)]
        config.stash[_LEFT].update(
            (_TARGETS[level], item.path.parent.name)
            for item in left
            if (level := _level(item)) > run
        )
        config.hook.pytest_deselected(items=left)


def _level(item: pytest.Item) -> int:
    """The first of ``_TARGETS`` that has it."""
    markers = list(item.iter_markers("dense"))
    return 0 if not markers else 2 if any(each.kwargs.get("nightly") for each in markers) else 1


def _of_test(item: pytest.Item) -> str:
    """The test that it is a case of."""
    return item.nodeid.partition("[")[0]


def _done(item: pytest.Item, run: int) -> bool:
    """The target before has run it, and as much of it."""
    drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return run > 1 or not (drawn or item.get_closest_marker("scaled"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that writes the report, which collects nothing itself."""
    left = session.config.stash[_LEFT]
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left"] = [[*of, count] for of, count in left.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """All workers collect the same, and leave out the same; one that was killed told nothing."""
    left = getattr(node, "workeroutput", {}).get("left", [])
    if left:
        node.config.stash[_LEFT] = Counter({(target, suite): n for target, suite, n in left})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left = config.stash[_LEFT]
    for target in _TARGETS:
        counts = {suite: count for (of, suite), count in sorted(left.items()) if of == target}
        if counts:
            parts = ", ".join(f"{count} of {suite}" for suite, count in counts.items())
            terminalreporter.write_line(f"left to {target}: {sum(counts.values())} tests ({parts})")
