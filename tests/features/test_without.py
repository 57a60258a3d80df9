"""The core's own tests pass without features: without all of them, and without each."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3cache.features import FEATURES
from tests.support.machines import ROOT
from tests.support.marks import nightly, slow
from tests.support.trees import check, without

pytestmark = pytest.mark.timeout(7200)

# Other folders compile for GPUs, run for hours, test features together, or have no tests.
NOT_OF_CORE = {"features", "gpu", "frameworks", "fleet", "fuzz", "soak", "support", "pythons"}
SUITES = sorted(
    path.name
    for path in (ROOT / "tests").iterdir()
    if any(path.rglob("test_*.py")) and path.name not in NOT_OF_CORE
)
FEW = ("test_layout.py", "test_stats.py", "test_records.py", "tier", "cache")
OFTEN = {"recall"}
PYTEST = ("pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not nightly")


@nightly
@pytest.mark.parametrize("suite", [*SUITES, "."])
def test_the_core_passes_its_tests_without_all_features(suite: str, tmp_path: Path) -> None:
    """Of ``.``, only the files at the top."""
    tree = without(tmp_path, *FEATURES)
    top = [str(path.relative_to(tree)) for path in (tree / "tests").glob("test_*.py")]
    paths = top if suite == "." else [f"tests/{suite}"]
    check(tree, *PYTEST, *paths, lacking=FEATURES)


@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=slow if name in OFTEN else nightly) for name in FEATURES]
)
def test_a_few_tests_pass_without_the_folder_of(feature: str, tmp_path: Path) -> None:
    """A feature is its folder and its name in the list."""
    few = (f"tests/{name}" for name in FEW)
    check(without(tmp_path, feature), *PYTEST, *few, lacking=[feature])


@nightly
@pytest.mark.parametrize("feature", FEATURES)
def test_types_hold_without_the_folder_of(feature: str, tmp_path: Path) -> None:
    tree = without(tmp_path, feature)
    check(tree, "mypy", "s3cache", "_s3cache_autoload.py", lacking=[feature])
