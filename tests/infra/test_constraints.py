"""constraints*.txt pin exactly, portably, and all that pyproject.toml asks for."""

from __future__ import annotations

from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = {
    path.name: [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for path in sorted(ROOT.glob("constraints*.txt"))
}
LINES = [line for lines in FILES.values() for line in lines]
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
    for lines in FILES.values():
        names = [canonicalize_name(Requirement(line).name) for line in lines]
        assert names == sorted(set(names))


def test_no_two_files_pin_one_package() -> None:
    assert len(PINS) == len(LINES)


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
