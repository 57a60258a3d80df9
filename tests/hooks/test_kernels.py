"""What was verified is what runs: the code of a hit is the entry's, whatever files there are."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.hooks._kernels import opened
from tests.support.marks import slow

if TYPE_CHECKING:
    from tests.support.sites import Machine, Site

pytestmark = pytest.mark.timeout(900)


def plant(machine: Machine, names: list[Path]) -> Path:
    """Put code that betrays itself where torch looks for the code of graphs."""
    betrayed = machine.root / "betrayed"
    for name in names:
        path = machine.root / "inductor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(betrayed)!r}, 'w').close()\n")
    return betrayed


@slow
def test_a_hit_runs_no_planted_file(site: Site) -> None:
    """Neither at the first level nor at the second."""
    writer = site.machine("writer")
    writer.run("fx_programs:at_both_levels", site.url, ["unknown"])
    inductor = writer.root / "inductor"
    names = [path.relative_to(inductor) for path in inductor.rglob("*.py")]
    assert names

    victim = site.machine("victim")
    betrayed = plant(victim, names)
    found = victim.run("fx_programs:at_both_levels", site.url, ["unknown"])
    assert found["trained"]["right"]
    assert (sum(found["trained"]["hits"].values()), found["trained"]["lowered"]) == (2, 0)
    way = found["ways"]["ways"]["unknown"]
    assert way["right"]
    assert (way["hits"], way["lowered"]) == (1, 0)
    assert not betrayed.exists()


@pytest.mark.parametrize(
    ("number", "torchs"),
    [
        (errno.ENOSPC, True),
        pytest.param(errno.ENOSPC, False, marks=slow),
    ],
)
def test_a_machine_without_room_misses_and_leaves_the_entry_alone(
    site: Site, number: int, torchs: bool
) -> None:
    found = site.machine("one").run("fx_programs:without_room", site.url, number, torchs)
    assert found["right"]
    assert found["misses"] == [{"machine": 1}, {"machine": 1}]
    assert found["hits"] == 1  # once there is room
    assert found["untouched"]


def test_an_image_is_loaded_although_its_directory_is_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As others may do in a temporary directory that is not sticky."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with opened(b"verified", "kernel") as path:
        (made,) = tmp_path.iterdir()
        made.rename(tmp_path / "away")
        made.mkdir()
        (made / Path(path).name).write_bytes(b"planted")
        assert Path(path).read_bytes() == b"verified"


def test_a_directory_that_others_may_write_holds_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdtemp(*_: object, **__: object) -> str:
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs").chmod(0o777)
        return str(tmp_path / "theirs")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(PermissionError, match="was exchanged"), opened(b"image", "kernel"):
        pass


def test_code_that_calls_what_only_lowering_registers_is_not_saved(site: Site) -> None:
    ran = site.machine("one").run("fx_programs:external_matmul", site.url)
    assert ran["right"]
    assert ran["bypass_reasons"] == {"kernel": 1}
    assert "extern_kernels.matmul_of_ours" in ran["stderr"]
    assert list(site.entries()) == []
