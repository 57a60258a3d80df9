"""If torch lacks a name, a feature or the whole cache is off; no program fails."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch

import s3cache
from s3cache.errors import UnsupportedTorchError
from s3cache.settings import WATCHED
from s3cache.torch_api import Fields, Internal, declarations, internals
from tests.hooks.jobs import account, log_records
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
    "recalling frames without tracing them (recall)",
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
    ran = site.machine("one").run("test_lacking:names", site.url, step)
    features = {each["feature"] for each in ran}
    assert features > {"", *(USED if step == 1 else ())}
    for found in ran:
        check(found)


@slow
def test_a_newer_torch_is_tried_and_without_a_name_compiles_without_a_cache(site: Site) -> None:
    """It hits, and warns once that this release is untested.

    The name may be an attribute: s3cache does not check attributes of a known release.
    """
    hit, lacking = site.machine("one").run("test_lacking:newer", site.url)
    assert [(ran["right"], sum(ran["hits"].values())) for ran in (hit, lacking)] == [
        *((True, 1), (True, 0))
    ]
    (warning,) = hit["warned"]
    assert "is newer than any release that was tested" in warning
    assert lacking["warned"]
    for warning in lacking["warned"]:
        assert "it compiles without a cache" in warning
        assert "lacks torch._guards:Guard .nonsense" in warning


# -- jobs with a torch that lacks a name that s3cache uses, or with a torch that is too new


def product(x: Any, y: Any) -> Any:
    """A graph that Inductor compiles without a C++ compiler."""
    return (x @ y).t()


def _compiled(url: str, **options: Any) -> dict[str, Any]:
    """Compile the graph; return whether it equals eager mode, and the counts."""
    torch.compiler.reset()
    x = torch.arange(9.0).reshape(3, 3)
    with s3cache.enabled(url, **options) as cache:
        is_right = torch.allclose(torch.compile(product)(x, x), product(x, x))
        return {**account(cache), "right": is_right}


def names(url: str, step: int) -> list[dict[str, Any]]:
    """Look up an entry without each ``step``-th name of torch; return the outcomes."""
    os.environ[WATCHED] = "1"  # every feature is in use
    warnings = log_records()
    _compiled(url)
    internals = [each for each in declarations if isinstance(each, Internal) and each.expected]
    optional = [each for each in internals if each.feature]
    found = []
    for internal in [*optional, *(each for each in internals if not each.feature)][::step]:
        place, internal.place = internal.place, "torch._guards:nonsense"
        with contextlib.suppress(UnsupportedTorchError):
            internal.bind()
        warnings.clear()
        try:
            ran = _compiled(url)
            outcome = {"hits": sum(ran["hits"].values()), "right": ran["right"]}
        except Exception as exc:
            outcome = {"raised": repr(exc)}
        finally:
            internal.place = place
            internal.bind()
        warned = [record.getMessage() for record in warnings]
        found.append({"name": place, "feature": internal.feature, "warned": warned, **outcome})
    return found


def newer(url: str) -> list[dict[str, Any]]:
    """Compile with a torch newer than any tested one, and then with one that lacks an attribute."""
    warnings, found = log_records(), []
    internals.OLDEST, internals.NEWEST = (2, 9), (2, 10)
    _compiled(url)
    for lacks in ("", "nonsense"):
        if lacks:
            warnings.clear()
            Fields("torch._guards:Guard", lacks)
        ran = _compiled(url)
        found.append({**ran, "warned": [record.getMessage() for record in warnings]})
    return found
