"""The distribution that installed a file is found by the lists of installed files."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3cache.graph import origin_of_file


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of installed libraries."""
    path = tmp_path / "own-packages"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    return path


def install(site: Path, distribution: str, *files: str) -> None:
    place = site / f"{distribution}.dist-info"
    place.mkdir()
    lines = [f"{file},sha256=abc,1" for file in files]
    place.joinpath("RECORD").write_text("\n".join(lines), encoding="utf-8")


def origin(site: Path, file: str) -> tuple[str, list[str]]:
    found = origin_of_file(str(site / file))
    return found.kind, found.name.split()[:3]


def test_a_package_belongs_to_the_distribution_that_lists_it(site: Path) -> None:
    """A distribution with its name comes first; most others are found by their files."""
    install(site, "another-1", "both/__init__.py", "own/__init__.py")
    install(site, "own-2", "own/__init__.py")
    assert origin(site, "own/a.py") == ("library", ["own", "own", "2"])
    assert origin(site, "both/a.py") == ("library", ["both", "another", "1"])
    assert origin(site, "copied/a.py") == ("user", ["copied"])


def test_a_distribution_that_is_installed_later_is_found(site: Path) -> None:
    install(site, "first-1", "first/__init__.py")
    assert origin(site, "first/a.py")[0] == "library"
    install(site, "second-1", "part/__init__.py")
    assert origin(site, "part/a.py") == ("library", ["part", "second", "1"])


def test_code_may_name_a_directory_of_another_machine(site: Path) -> None:
    site.rmdir()
    assert origin(site, "own/a.py") == ("user", ["own"])
