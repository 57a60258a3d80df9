"""An entry works on a machine that has nothing in common with the one that made it but its kind."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def other_prefix(tmp_path: Path) -> str:
    """A Python with another prefix; its torch is the same, seen at another place."""
    root = tmp_path / "elsewhere" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        (packages / entry.name).symlink_to(entry)
    return str(root / "bin" / "python")


@pytest.fixture
def noexec(tmp_path: Path) -> Iterator[Path | None]:
    """A directory from which nothing can be executed or mapped; ``None`` without the right."""
    place = tmp_path / "noexec"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "noexec,size=64m", "tmpfs", str(place)]
    try:
        mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
    except FileNotFoundError:
        mounted = False
    yield place if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def test_a_hit_starts_no_process_and_needs_no_compiler(
    written: Callable[..., tuple[Site, Any]],
    other_prefix: str,
    noexec: Path | None,
    tmp_path: Path,
) -> None:
    """Other prefix, home, user, cache and temporary directory; nothing on ``PATH``.

    Forward and backward of a training step, and a graph of Inductor's C++ wrapper.
    """
    # Probing the instruction set is what a hit must not do: it is not switched off here.
    site, first = written("train", TORCHINDUCTOR_VEC_ISA_OK="")
    assert first["misses"] == {"absent": 2}
    assert first["saved"] == 2
    assert first["started"]  # the compiler; so the watch would see one

    reader = site.machine("reader", PATH="", TORCHINDUCTOR_VEC_ISA_OK="")
    if noexec is not None:
        reader.environment["TMPDIR"] = str(noexec)
    found = reader.run("jobs:train", site.url, python=other_prefix)
    assert found["torch_at"] != first["torch_at"]
    assert found["hits"] == {"local": 0, "remote": 2}
    assert found["misses"] == {}
    assert found["started"] == []
    assert found["error"] <= max(first["error"], 1e-5)
    assert found["torch"]["autograd_cache_hit"] == 2
    assert found["time_saved_s"] > 0
