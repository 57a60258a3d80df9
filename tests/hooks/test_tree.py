"""What was listed of a directory is used again only while it says the same as listing it anew."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3cache.hooks._installation import listing_of, settled, state_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """As old as what is installed."""
    root = tmp_path / "torch"
    for name in ("a.py", "sub/b.py", "sub/c.so", "sub/inner/d.cpp", "sub/note.txt", "lib/e.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for path in (root, *root.rglob("*")):
        os.utime(path, (10**9, 10**9))
    return root


def kept(root: Path) -> Any:
    """As it is read from a file."""
    return json.loads(json.dumps(settled(listing_of(str(root), None))))


def _times(path: Path) -> None:
    os.utime(path, ns=(10**18, 10**18 + 1))


def _write(path: Path) -> None:
    path.parent.mkdir()
    path.touch()


CHANGES: dict[str, Callable[[Path], object]] = {
    "another size": lambda root: (root / "sub/b.py").write_text("longer than it was"),
    "another time": lambda root: _times(root / "sub/inner/d.cpp"),
    "one more": lambda root: (root / "sub/new.py").write_text(""),
    "one less": lambda root: (root / "sub/c.so").unlink(),
    "another name": lambda root: (root / "a.py").rename(root / "z.py"),
    "one more directory": lambda root: _write(root / "sub/more/f.py"),
    "one directory less": lambda root: shutil.rmtree(root / "sub/inner"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(root: Path, change: str) -> None:
    known = kept(root)
    before = state_of(listing_of(str(root), known))
    CHANGES[change](root)
    after = listing_of(str(root), known)
    assert state_of(after) != before
    assert state_of(after) == state_of(listing_of(str(root), None))


def test_what_is_no_source_does_not_matter(root: Path) -> None:
    before = state_of(listing_of(str(root), None))
    (root / "sub/note.txt").write_text("longer than it was")
    (root / "lib/e.py").write_text("longer than it was")
    (root / "__pycache__").mkdir()
    assert state_of(listing_of(str(root), None)) == before


def test_nothing_is_listed_while_no_directory_has_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = kept(root)
    assert set(known) == {str(root), *(str(root / name) for name in ("sub", "sub/inner"))}
    expected = state_of(listing_of(str(root), None))
    monkeypatch.delattr(os, "scandir")
    assert state_of(listing_of(str(root), known)) == expected


def test_what_was_changed_a_moment_ago_is_listed_again(root: Path) -> None:
    """Another change in that moment would bear the same time."""
    (root / "sub/new.py").write_text("")
    assert kept(root) == {}


@pytest.mark.parametrize(
    "known",
    [None, 7, [], {}, {"/": [0, []]}, {"ROOT": 7}, {"ROOT": [0, ["a.py"]]}, {"ROOT": ["x", [1]]}],
)
def test_what_is_no_listing_of_it_is_not_used(root: Path, known: Any) -> None:
    if isinstance(known, dict):
        known = {name.replace("ROOT", str(root)): value for name, value in known.items()}
    assert listing_of(str(root), known) == listing_of(str(root), None)


def test_a_listing_that_leads_elsewhere_is_not_used(root: Path, tmp_path: Path) -> None:
    known = kept(root)
    known[str(tmp_path)] = [tmp_path.stat().st_mtime_ns, []]
    assert str(tmp_path) not in listing_of(str(root), known)


def test_a_link_to_nothing_is_part_of_it(root: Path) -> None:
    before = state_of(listing_of(str(root), None))
    (root / "gone.py").symlink_to(root / "nowhere")
    assert state_of(listing_of(str(root), None)) != before
