"""Packages that only some environments have; tests that need them are skipped elsewhere."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.support.machines import ROOT, Machine

# The directory where make test installs Triton, which other tests do not see.
_SITE = Path(os.environ.get("S3CACHE_TEST_TRITON") or ROOT / ".venv-triton/site")


def _parent_of(package: str) -> str | None:
    if (_SITE / package).is_dir():
        return str(_SITE)
    found = importlib.util.find_spec(package)
    places = None if found is None else found.submodule_search_locations
    return str(Path(next(iter(places))).parent) if places else None


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if one of the packages is not installed."""
    absent = [each for each in packages if _parent_of(each) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{' and '.join(absent)} not installed")


def machine(root: Path, *packages: str, **environment: str) -> Machine:
    """Return a machine that can import these packages too."""
    places = dict.fromkeys(filter(None, map(_parent_of, packages)))
    return Machine(root, PYTHONPATH=os.pathsep.join([str(ROOT), *places]), **environment)
