"""Kernels of Triton are loaded from where nobody else may write; without a GPU, up to the files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import tests.support.compiler  # noqa: F401
from s3cache._problems import is_machines_trouble
from s3cache.hooks._patching import Patches
from s3cache.hooks._triton import TritonSeam, check_triton_directory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KERNEL = "KERNELHASH"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where torch puts them: Inductor's directory has it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = os.umask(0o002)  # of many machines with several users
    yield tmp_path / "inductor" / "triton" / "0"
    os.umask(before)


def emit(*, rebuilding: bool = True) -> None:
    """What torch does with an entry that has a kernel, under the seam."""
    from torch._inductor.triton_bundler import (
        TritonBundle,
        TritonBundler,
        TritonKernelArtifact,
        TritonKernelArtifacts,
    )

    files = [TritonKernelArtifact("kernel.cubin", b"verified")]
    bundle = TritonBundle([TritonKernelArtifacts(KERNEL, 0, files)], [])
    patches = Patches()
    TritonSeam(lambda: rebuilding).install(patches)
    try:
        TritonBundler.read_and_emit(bundle)
    finally:
        patches.undo()


def planted(base: Path, change: str) -> None:
    place = base / KERNEL
    place.mkdir(parents=True)
    for above in (place, base, base.parent, base.parent.parent):
        above.chmod(0o755)
    (place / "kernel.cubin").write_bytes(b"planted")
    (place / "kernel.cubin").chmod(0o644)
    if change == "a directory that others may write":
        base.chmod(0o775)
    elif change == "one above that anybody may rename in":
        base.parent.chmod(0o777)
    elif change == "a kernel's directory that others may write":
        place.chmod(0o777)
    elif change == "a file that others may write":
        (place / "kernel.cubin").chmod(0o664)
    elif change == "a file that is a link":
        (place / "kernel.cubin").rename(base.parent / "theirs")
        (place / "kernel.cubin").symlink_to(base.parent / "theirs")
    elif change == "a directory that is a link":
        place.rename(base.parent / "theirs")
        place.symlink_to(base.parent / "theirs")
    elif change == "a file of another user":
        base.chmod(0o700)
        os.chown(place / "kernel.cubin", 12_002, 12_002)


CHANGES: list[Any] = [
    "a directory that others may write",
    "one above that anybody may rename in",
    "a kernel's directory that others may write",
    "a file that others may write",
    "a file that is a link",
    "a directory that is a link",
    pytest.param(
        "a file of another user",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_others_could_have_written_is_not_loaded(base: Path, change: str) -> None:
    """It is a miss on this machine, and the entry is as good as it was."""
    planted(base, change)
    with pytest.raises(PermissionError, match="where others may write") as raised:
        emit()
    assert is_machines_trouble(raised.value)
    emit(rebuilding=False)  # torch's own entries are its own business


def test_kernels_go_where_nobody_else_gets(base: Path) -> None:
    """Whatever the umask; and are found there by the next one."""
    for _ in range(2):
        emit()
        assert (base / KERNEL / "kernel.cubin").read_bytes() == b"verified"
    assert base.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_directories_above_are_made_for_nobody_else_to_write(base: Path, umask: int) -> None:
    """Else whoever may write there could give the kernels' directory another name."""
    os.umask(umask)
    base = base / "further" / "below"
    check_triton_directory(str(base), KERNEL)
    for made in (base, *base.parents[:4]):
        assert made.stat().st_mode & 0o022 == 0


def test_what_this_users_torch_has_compiled_is_taken(base: Path) -> None:
    planted(base, "nothing")
    emit()
    check_triton_directory(str(base), KERNEL)
    assert (base / KERNEL / "kernel.cubin").read_bytes() == b"planted"
