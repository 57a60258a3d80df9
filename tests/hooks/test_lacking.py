"""If torch lacks a name, a feature or the whole cache is off; no program fails."""

from __future__ import annotations

from typing import Any

import pytest

from s3cache.torch_api import internals
from tests.support.marks import nightly, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

# The features that every process with the settings of the job uses.
USED = {
    "torch's remote caches of measurements and profiles (ports)",
    internals.WATCHING,
    internals.KEY_LOGS,
    internals.TORCH_KEY,
    internals.TRACES,
}


def check(found: dict[str, Any]) -> None:
    """Check that a missing name turns off its feature, or the cache if it belongs to none."""
    assert found.get("right"), found
    if not found["feature"]:
        (warning,) = found["warned"]
        assert "it compiles without a cache" in warning, found
        assert found["hits"] == 0, found
    else:
        off = [f"{found['feature']} is off: "] if found["feature"] in USED else []
        assert [each.partition("torch ")[0] for each in found["warned"]] == off, found
        assert found["hits"] == 1, found


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=nightly)])
def test_a_missing_name_turns_off_a_feature_or_the_cache(step: int, site: Site) -> None:
    ran = site.machine("one").run("lacking:names", site.url, step)
    features = {each["feature"] for each in ran}
    assert features > {"", *(USED if step == 1 else ())}
    for found in ran:
        check(found)


@slow
def test_a_newer_torch_is_tried(site: Site) -> None:
    """It hits, and warns once that this release is untested."""
    ran = site.machine("one").run("lacking:newer", site.url)
    assert ran["right"]
    assert sum(ran["hits"].values()) == 1
    (warning,) = ran["warned"]
    assert "is newer than any release that was tested" in warning


@slow
def test_a_newer_torch_that_lacks_a_name_compiles_without_a_cache(site: Site) -> None:
    """Also if it lacks an attribute. s3cache does not check attributes of a known release."""
    ran = site.machine("one").run("lacking:newer", site.url, "nonsense")
    assert ran["right"]
    assert sum(ran["hits"].values()) == 0
    assert ran["warned"]
    for warning in ran["warned"]:
        assert "it compiles without a cache" in warning
        assert "lacks torch._guards:Guard .nonsense" in warning
