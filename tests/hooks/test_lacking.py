"""A torch that lacks a name: the cache is on without a feature, or off; no program fails."""

from __future__ import annotations

from typing import Any

import pytest

from s3cache.torch_api import internals
from tests.support.marks import nightly, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)

# Those of which every process with the settings of the job needs the names.
USED = {
    internals.PROFILES,
    internals.PORTS,
    internals.WATCHING,
    internals.KEY_LOGS,
    internals.TORCH_KEY,
    internals.TRACES,
}


def check(found: dict[str, Any]) -> None:
    """A required name turns the cache off, with one warning; any other only its feature."""
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
def test_without_a_name_a_feature_or_the_cache_is_off(step: int, site: Site) -> None:
    ran = site.machine("one").run("lacking:names", site.url, step)
    features = {each["feature"] for each in ran}
    assert features > {"", *(USED if step == 1 else ())}
    for found in ran:
        check(found)


@slow
def test_a_newer_torch_is_tried(site: Site) -> None:
    """It hits, and says once that this release is untested."""
    ran = site.machine("one").run("lacking:newer", site.url)
    assert ran["right"]
    assert sum(ran["hits"].values()) == 1
    (warning,) = ran["warned"]
    assert "is newer than any release that was tested" in warning


@slow
def test_a_newer_torch_that_lacks_something_compiles_without_a_cache(site: Site) -> None:
    """Also where it is an attribute that is lacking, which a known release is not asked for."""
    ran = site.machine("one").run("lacking:newer", site.url, "nonsense")
    assert ran["right"]
    assert sum(ran["hits"].values()) == 0
    assert ran["warned"]
    for warning in ran["warned"]:
        assert "it compiles without a cache" in warning
        assert "lacks torch._guards:Guard .nonsense" in warning
