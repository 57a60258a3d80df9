"""The distribution that installed a file is found by the lists of installed files."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

import pytest

from s3cache.graph import is_as_installed, origin_of_file


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


@pytest.mark.parametrize(
    ("text", "newer", "same"),
    [
        ("WIDTH = 4", False, True),
        ("WIDTH = 4", True, True),  # the whole directory was copied
        ("WIDTH = 5", True, False),
        ("WIDTH = 44", False, False),
    ],
)
def test_a_file_that_was_edited_where_it_is_installed_is_noticed(
    text: str, newer: bool, same: bool, site: Path
) -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"WIDTH = 4").digest()).decode().rstrip("=")
    info = site / "own-1.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(f"own/__init__.py,sha256={digest},9\nown/b.py,,\n")
    (site / "own").mkdir()
    path = site / "own" / "__init__.py"
    path.write_text(text)
    os.utime(info / "RECORD", (1, 1))
    os.utime(path, (2, 2) if newer else (1, 1))
    assert is_as_installed(str(path)) is same
    assert is_as_installed(str(site / "own" / "b.py"))  # its digest is not listed
    assert is_as_installed(str(site / "other.py"))
