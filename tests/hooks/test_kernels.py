"""A hit runs the verified code of its entry, and no other file."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest

from s3cache.hooks._rebuild import Kernels, NotSharableError, files_named_in, opened
from s3cache.hooks._state import CompileState
from tests.support.marks import slow
from tests.support.sites import Machine, Site

pytestmark = pytest.mark.timeout(900)


def plant(machine: Machine, names: list[Path]) -> Path:
    """Plant code that makes a file when it runs, in place of the code of graphs."""
    trace = machine.root / "betrayed"
    for name in names:
        path = machine.root / "inductor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(trace)!r}, 'w').close()\n")
    return trace


@slow
def test_a_hit_runs_no_planted_file(site: Site) -> None:
    """It runs none at either level."""
    writer = site.machine("writer")
    writer.run("fx_programs:at_both_levels", site.url, ["unknown"])
    inductor = writer.root / "inductor"
    names = [path.relative_to(inductor) for path in inductor.rglob("*.py")]
    assert names

    target = site.machine("target")
    trace = plant(target, names)
    found = target.run("fx_programs:at_both_levels", site.url, ["unknown"])
    assert found["trained"]["right"]
    assert (sum(found["trained"]["hits"].values()), found["trained"]["lowered"]) == (2, 0)
    way = found["ways"]["ways"]["unknown"]
    assert way["right"]
    assert (way["hits"], way["lowered"]) == (1, 0)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("number", "torchs"),
    [
        (errno.ENOSPC, True),
        pytest.param(errno.ENOSPC, False, marks=slow),
    ],
)
def test_a_machine_with_a_full_disk_misses_and_does_not_touch_the_entry(
    site: Site, number: int, torchs: bool
) -> None:
    found = site.machine("one").run("fx_programs:without_room", site.url, number, torchs)
    assert found["right"]
    assert found["misses"] == [{"machine": 1}, {"machine": 1}]
    assert found["hits"] == 1  # once there is room
    assert found["untouched"]


def test_an_image_is_loaded_from_a_directory_that_no_other_user_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if other users could rename files in the temporary directory."""
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    with opened(b"verified", "kernel") as path:
        assert Path(path).read_bytes() == b"verified"
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        assert list(shared.iterdir()) == []
    assert not Path(path).parent.exists()


def test_an_image_that_loads_a_kernel_by_its_path_is_recognized() -> None:
    """As with ``cpp_wrapper`` on a GPU. Messages name the source, but no process reads it."""
    source, kernel = "/home/cache/ab/cab.main.cpp", "/home/cache/triton/0/ABC/kernel.cubin"
    image = f"\x7fELF\0{source}\0{kernel}\0/home/cached/other.cubin\0".encode()
    assert files_named_in(image, "/home/cache") == [kernel]
    assert files_named_in(memoryview(image), "/home/other") == []


def test_an_image_that_loads_a_kernel_by_its_path_is_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/cache")
    kernels = Kernels(CompileState())
    source, kernel = b"/home/cache/ab/cab.main.cpp", b"/home/cache/ABC/kernel.cubin"
    kernels._images.update(names=source, loads=source + b"\0" + kernel)
    assert kernels._image("names") == b"/.........." + source.removeprefix(b"/home/cache")
    with pytest.raises(NotSharableError, match=r"reads a file of this machine .*kernel\.cubin"):
        kernels._image("loads")


def test_code_that_calls_a_function_that_lowering_registers_is_not_saved(site: Site) -> None:
    ran = site.machine("one").run("fx_programs:external_matmul", site.url)
    assert ran["right"]
    assert ran["bypass_reasons"] == {"kernel": 1}
    assert "extern_kernels.matmul_of_ours" in ran["stderr"]
    assert list(site.entries()) == []
