"""An entry works on a machine that has only its kind in common with the writer's machine."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.marks import nightly, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def other_prefix(tmp_path: Path) -> str:
    """Return a Python with another prefix; it has the same torch under another path."""
    root = tmp_path / "elsewhere" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        (packages / entry.name).symlink_to(entry)
    return str(root / "bin" / "python")


@pytest.fixture
def noexec(tmp_path: Path) -> Iterator[Path | None]:
    """A directory from which no file can be executed or mapped; ``None`` if mounting fails."""
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


@slow
def test_a_hit_starts_no_process_and_needs_no_compiler(
    written: Callable[..., tuple[Site, Any]],
    other_prefix: str,
    noexec: Path | None,
    tmp_path: Path,
) -> None:
    """Other prefix, home, user, cache and temporary directory; nothing on ``PATH``.

    Forward and backward of a training step, and a graph of Inductor's C++ wrapper.
    """
    # A hit must not probe the instruction set, so the probe is not turned off here.
    site, first = written("train", TORCHINDUCTOR_VEC_ISA_OK="")
    assert first["misses"] == {"absent": 2}
    assert first["saved"] == 2
    assert first["started"]  # the compiler, so the watch sees processes

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


@slow
@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=nightly)])
def test_machines_with_other_numbers_of_threads_may_share_code(dynamic: bool, site: Site) -> None:
    """They share code for any number of threads, if torch is set to generate such code."""
    found = site.machine("one").run("jobs:reduce", site.url, [2, 5, 1], dynamic)
    assert [each["saved"] for each in found] == ([1, 0, 1] if dynamic else [1, 1, 1])
    assert sum(found[1]["hits"].values()) == int(dynamic)
    assert max(each["error"] for each in found) < 1e-3
