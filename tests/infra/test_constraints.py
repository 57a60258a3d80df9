"""constraints.txt pins exactly, portably, and all that pyproject.toml asks for."""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINES = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
PINS = {canonicalize_name(pin.name): pin for pin in map(Requirement, LINES)}


@pytest.mark.parametrize("line", LINES)
def test_each_line_is_one_exact_version_of_no_machine_in_particular(line: str) -> None:
    pin = Requirement(line)
    (version,) = pin.specifier
    assert version.operator == "=="
    assert "+" not in version.version
    assert pin.url is None
    assert not pin.extras


def test_names_are_sorted_and_unique() -> None:
    names = [canonicalize_name(Requirement(line).name) for line in LINES]
    assert names == sorted(set(names))


def test_every_direct_dependency_is_pinned_within_its_range() -> None:
    """On the oldest Python that all pins are for; see the markers."""
    environment: dict[str, Any] = {**default_environment(), "python_version": "3.11"}
    for text in requires("torch-s3cache") or []:
        wanted = Requirement(text)
        if wanted.name == "torch-s3cache":
            continue
        pin = PINS[canonicalize_name(wanted.name)]
        (version,) = pin.specifier
        assert wanted.specifier.contains(version.version), wanted
        assert pin.marker is None or pin.marker.evaluate({**environment, "extra": ""}), pin
