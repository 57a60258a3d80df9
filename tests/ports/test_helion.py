"""Helion's ``RemoteCacheBackend`` over the cache, through Helion's own functions."""

from __future__ import annotations

import pytest

from s3cache.testing import Outcome
from tests.ports.installed import machine, needs
from tests.support.machines import remote_url
from tests.support.marks import slow

pytestmark = [slow, needs("helion", "triton"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Outcome]:
    """What two machines found, one after the other; each puts configurations of kernels."""
    root = tmp_path_factory.mktemp("helion")
    one, two = (
        machine(root / name, "helion", "triton").run(
            "tests.ports.helion_jobs:run", *kernels, remote=remote_url(root)
        )
        for name, kernels in (("one", ["add", "other"]), ("two", ["sum"]))
    )
    return one, two


def test_a_configuration_is_found_on_a_second_machine(outcomes: tuple[Outcome, Outcome]) -> None:
    """``enable()`` is enough; the newest configuration counts."""
    one, two = outcomes
    assert (one.result["before"], one.result["after"]) == (None, "second")
    assert two.result["before"] == "second"
    assert two.stats.ports["helion"].hits == {"local": 1, "remote": 1}


def test_a_search_begins_with_what_other_machines_found(outcomes: tuple[Outcome, Outcome]) -> None:
    """For inputs of the same types and the same device; Helion asks for all of that."""
    result = outcomes[1].result
    assert result["listed"] == ["sum", "second", "first", "other", "add"]
    assert result["last"] == ["sum"]
    assert result["seeds"] == ["sum", "add"]
    assert result["of another device"] == []
