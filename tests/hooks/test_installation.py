"""What an earlier process computed is believed only from a file of this user's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from s3cache.hooks._installation import remember_installation
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys that torch is given, instead of its own."""
    keys: list[bytes] = []
    monkeypatch.setattr(internals, "set_torch_key", keys.append)
    return keys


def forged(directory: Path) -> Path:
    """A file that fits this installation, with another key in it."""
    remember_installation(str(directory))
    (path,) = directory.glob("installation.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch_key": "00" * 32}))
    return path


def test_a_second_process_computes_nothing(tmp_path: Path, given: list[bytes]) -> None:
    path = forged(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    remember_installation(str(tmp_path))
    assert given == [bytes(32)]


def test_a_file_that_others_may_have_written_is_not_believed(
    tmp_path: Path, given: list[bytes]
) -> None:
    path = forged(tmp_path)
    path.chmod(0o666)
    remember_installation(str(tmp_path))
    assert given == []
    assert json.loads(path.read_text())["torch_key"] != "00" * 32  # and is made anew

    (linked := tmp_path / "linked").mkdir()
    path = forged(linked)
    path.rename(tmp_path / "theirs")
    path.symlink_to(tmp_path / "theirs")
    remember_installation(str(linked))
    assert given == []
