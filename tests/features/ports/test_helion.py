"""Helion's own functions use the cache through our ``RemoteCacheBackend``."""

from __future__ import annotations

import pytest

from s3cache.testing import Outcome
from tests.features.ports.installed import machine, needs
from tests.support.machines import remote_url
from tests.support.marks import slow

pytestmark = [slow, needs("helion", "triton"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Outcome]:
    """Run two machines in turn that put configurations of kernels; return their results."""
    root = tmp_path_factory.mktemp("helion")
    one, two = (
        machine(root / name, "helion", "triton").run(
            "tests.features.ports.helion_jobs:run", *kernels, remote=remote_url(root)
        )
        for name, kernels in (("one", ["add", "other"]), ("two", ["sum"]))
    )
    return one, two


def test_a_configuration_is_found_on_a_second_machine(outcomes: tuple[Outcome, Outcome]) -> None:
    """``enable()`` is enough; the newest configuration is found."""
    one, two = outcomes
    assert (one.result["before"], one.result["after"]) == (None, "second")
    assert two.result["before"] == "second"
    assert two.stats.kinds["helion"].hits == {"local": 1, "remote": 1}


def test_a_search_begins_with_configurations_of_other_machines(
    outcomes: tuple[Outcome, Outcome],
) -> None:
    """Helion requires the same types of inputs and the same device."""
    result = outcomes[1].result
    assert result["listed"] == ["sum", "second", "first", "other", "add"]
    assert result["last"] == ["sum"]
    assert result["seeds"] == ["sum", "add"]
    assert result["of another device"] == []
