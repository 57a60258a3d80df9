"""No machine compiles or measures again what another one has compiled or measured with Triton.

Triton compiles real machine code for a stand-in for the GPU, and launches nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from s3cache import frame
from s3cache.testing import Outcome, ProgramError
from s3cache.trust import generate
from tests.features.ports.installed import machine, needs
from tests.support.machines import ROOT, remote_url
from tests.support.marks import cases, nightly, slow

pytestmark = [needs("triton"), pytest.mark.timeout(900)]

_A100 = "NVIDIA A100-SXM4-80GB"
_STEPS = {"ptxas", "cc", "measured"}


def steps(outcome: Outcome) -> dict[str, int]:
    """Return how often a job compiled, linked or measured."""
    return {name: outcome.result[name] for name in _STEPS if name in outcome.result}


def run(root: Path, name: str, job: str, *arguments: Any, **settings: Any) -> Outcome:
    packages = ("triton", "liger_kernel", "fla")
    return machine(root / name, *packages).run(
        f"tests.features.ports.jobs:{job}", *arguments, remote=remote_url(root), settings=settings
    )


@pytest.mark.parametrize(
    ("job", "entries"),
    [
        ("everything", 4),
        pytest.param("liger", 2, marks=[nightly, needs("liger_kernel")]),
        pytest.param("fla", 1, marks=[nightly, needs("fla")]),
    ],
)
def test_a_second_machine_compiles_and_measures_nothing(
    tmp_path: Path, job: str, entries: int
) -> None:
    """Jobs use a kernel, the winner of a measurement, a C library, and kernels of Liger and FLA."""
    first = run(tmp_path, "one", job)
    assert first.result["ptxas"]
    assert first.stats.kinds["triton"].saved >= entries
    second = run(tmp_path, "two", job)
    assert steps(second) == {}
    assert second.stats.kinds["triton"].misses == {}
    assert second.result.items() <= first.result.items()


@pytest.mark.parametrize(
    "ended",
    cases(
        ["compiled", "failed", "killed"], slow_ones=["compiled", "failed"], nightly_ones=["killed"]
    ),
)
def test_processes_of_a_machine_compile_a_kernel_once(tmp_path: Path, ended: str) -> None:
    """The second process waits until the first one has compiled the kernel or has failed."""
    local = {"S3CACHE_LOCAL_DIR": str(tmp_path / "local")}

    def start(name: str) -> Outcome:
        rank = machine(tmp_path / name, "triton", **local)
        try:
            return rank.run(
                "tests.features.ports.jobs:claimed", name, ended, remote=remote_url(tmp_path)
            )
        except ProgramError as exc:
            return exc.outcome

    with ThreadPoolExecutor() as pool:
        one, two = pool.map(start, ("one", "two"))
    triton = two.stats.kinds["triton"]
    if ended == "compiled":
        assert (one.result["ptxas"], steps(two), triton.misses) == (1, {}, {})
        assert triton.hits["local"] == 1
    else:
        assert one.exit_code == (-signal.SIGKILL if ended == "killed" else 0)
        assert (two.result["ptxas"], triton.misses) == (1, {"absent": 1})  # not "waited"


@slow
def test_measurements_are_not_shared_with_another_device(tmp_path: Path) -> None:
    """Two GPUs of one architecture; Triton's own key is the same for both."""
    run(tmp_path, "one", "measured")
    other = run(tmp_path, "two", "measured", _A100)
    assert steps(other)["measured"] == 2
    assert other.stats.kinds["triton"].hits == {"local": 0, "remote": 1}  # the kernel


@slow
def test_kernels_with_inputs_outside_of_the_key_are_not_shared(tmp_path: Path) -> None:
    """Such inputs are overridden stages, plain globals and plugins; a variable is part of our key.

    Kernels that Inductor compiles are not shared either: they are part of its graphs.
    """
    seen = run(tmp_path, "one", "unnamed").result
    kept = {"plain": 1, "variable": 1}
    assert seen == {**kept, "override": 0, "globals": 0, "plugin": 0, "inductor": 0}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the remote of a machine that has compiled a kernel."""
    root = tmp_path_factory.mktemp("filled")
    run(root, "one", "kernel")
    return root / "remote"


@slow
def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path: Path, filled: Path) -> None:
    shutil.copytree(filled, tmp_path / "remote")
    (found,) = (tmp_path / "remote").rglob("triton-*")
    content = bytearray(found.read_bytes())
    content[-1] ^= 1
    found.write_bytes(content)
    second = run(tmp_path, "two", "kernel")
    assert second.result["ptxas"] == 1
    assert second.stats.kinds["triton"].misses == {"corrupt": 1}
    assert steps(run(tmp_path, "three", "kernel")) == {}  # the entry was replaced
    # A restart on the same machine finds the files in Triton's own directory, without a lookup.
    again = run(tmp_path, "three", "kernel")
    assert (steps(again), again.stats.kinds) == ({}, {})


@pytest.mark.parametrize(
    "share", [pytest.param(False, marks=slow), pytest.param(True, marks=nightly)]
)
def test_entries_contain_paths_of_sources_only_with_share_sources(
    tmp_path: Path, filled: Path, share: bool
) -> None:
    if share:
        run(tmp_path, "one", "kernel", share_sources=True)
    (found,) = (tmp_path / "remote" if share else filled).rglob("triton-*")
    entry = frame.decode(found.read_bytes())
    assert {"add.json", "add.cubin"} <= {*entry.names}
    assert ("add.ttir" in entry.names) is share
    content = b"".join(bytes(entry.section(name)) for name in entry.names)
    assert (str(ROOT).encode() in content) is share


@slow
def test_a_policy_refuses_unsigned_kernels(tmp_path: Path, filled: Path) -> None:
    """Neither an entry of the bucket nor a file of Triton's directory is used."""
    shutil.copytree(filled, tmp_path / "remote")
    trusted = generate("ci").public_text()
    there = machine(tmp_path / "two", "triton")
    url, job = remote_url(tmp_path), "tests.features.ports.jobs:kernel"
    there.run(job, remote=f"file://{tmp_path}/other?create=1")  # leaves unsigned files
    wary = there.run(job, remote=url, settings={"trust": "require", "trusted_keys": trusted})
    assert wary.result["ptxas"] == 1
    assert wary.stats.kinds["triton"].refused


@nightly
def test_an_upload_survives_a_kill(tmp_path: Path) -> None:
    url, one = remote_url(tmp_path), machine(tmp_path / "one", "triton")
    with pytest.raises(ProgramError) as killed:
        one.run("tests.features.ports.jobs:killed", remote=url)
    assert killed.value.outcome.exit_code == -signal.SIGKILL
    one.run("tests.features.ports.jobs:nothing", remote=url)
    assert steps(run(tmp_path, "two", "kernel")) == {}


@nightly
def test_the_port_can_be_disabled(tmp_path: Path) -> None:
    seen = run(tmp_path, "one", "kernel", ports="torch,helion")
    assert seen.result["ptxas"] == 1
    assert seen.stats.kinds == {}
    assert not [*(tmp_path / "remote").rglob("triton-*")]


@slow
def test_the_environment_enables_the_port_with_the_first_kernel(tmp_path: Path) -> None:
    """The program does not use torch.compile or s3cache. A program without kernels imports no
    modules of the cache."""
    there = machine(tmp_path / "one", "triton", S3CACHE_URL=remote_url(tmp_path))
    assert there.run("tests.features.ports.jobs:without_kernels").result == []
    assert there.run("tests.features.ports.jobs:kernel").result["ptxas"] == 1
    assert os.listdir(tmp_path / "remote")
    other = machine(tmp_path / "two", "triton", S3CACHE_URL=remote_url(tmp_path))
    assert steps(other.run("tests.features.ports.jobs:kernel")) == {}


@slow
def test_a_program_without_torch_can_set_the_cache_manager(tmp_path: Path) -> None:
    """One variable names our manager for Triton, another one the cache for s3cache."""
    manager = {"TRITON_CACHE_MANAGER": "s3cache.features.ports.triton:CacheManager"}
    compiled = []
    for name in ("one", "two"):
        there = machine(tmp_path / name, "triton", S3CACHE_URL=remote_url(tmp_path), **manager)
        command = [sys.executable, "-m", "tests.features.ports.alone"]
        compiled.append(subprocess.check_output(command, env=there.environment, text=True))
    assert compiled == ["1\n", "0\n"]


@slow
def test_file_names_in_an_entry_cannot_leave_the_directory(tmp_path: Path) -> None:
    """Even a trusted entry with such a name is not used."""
    planted = "../../kernel.json", "__grp__add.json", "/tmp/kernel.json"
    assert run(tmp_path, "one", "planted", *planted).result == [[False, False]] * len(planted)
