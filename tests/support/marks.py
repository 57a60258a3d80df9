"""The marks of slow tests, and helpers for tests that run many cases.

``make test`` runs what is neither ``slow`` nor ``nightly``, ``make test-all`` what is not
``nightly``, and ``make test-nightly`` everything. A slow test takes long, or is one of many alike.
A nightly one takes minutes, or measures time or memory, which a slow machine must not fail.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import pytest
from _pytest.mark import ParameterSet
from hypothesis import settings

slow = pytest.mark.slow
nightly = pytest.mark.nightly


def examples(times: float) -> int:
    """Return ``times`` as many examples as Hypothesis draws for other tests."""
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
    """Return the values of a parameter with which the tests of this module will run.

    For fixtures that run many cases in one process and can skip those that were not asked for.
    ``others`` are values of other parameters that a test must have to count.
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
