"""The marks of slow tests, and helpers for tests that run many cases.

``make test`` runs tests that are neither ``slow`` nor ``nightly``, ``make test-all`` runs the slow
ones too, and ``make test-nightly`` runs all. A slow test takes long, or is one of many similar
ones. A nightly test takes minutes, or measures time or memory, which must not fail on a slow
machine.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

slow = pytest.mark.slow
nightly = pytest.mark.nightly


def examples(times: float) -> int:
    """Return ``times`` the number of examples that Hypothesis draws for other tests."""
    return max(1, round(times * settings().max_examples))


def cases(
    names: Iterable[str], *, slow_ones: Container[str] = (), nightly_ones: Container[str] = ()
) -> list[ParameterSet]:
    """Return names as parameters, some of them marked as slow or nightly."""
    return [
        pytest.param(
            name, marks=nightly if name in nightly_ones else slow if name in slow_ones else ()
        )
        for name in names
    ]


def selected(request: pytest.FixtureRequest, parameter: str, **others: str) -> set[str]:
    """Return the values of a parameter in the selected tests of this module.

    For fixtures that run many cases in one process and can skip cases that were not selected. Only
    tests with the values ``others`` of other parameters count.
    """
    return {
        str(item.callspec.params[parameter])
        for item in request.session.items
        if item.path == request.path
        and isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and parameter in item.callspec.params
        and others.items() <= item.callspec.params.items()
    }
