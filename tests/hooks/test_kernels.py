"""A hit runs the verified code of its entry, and no other file."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tests.support.compiler  # noqa: F401
from s3cache.artifact import unpickle
from s3cache.errors import is_machine_trouble
from s3cache.hooks._rebuild import Kernels, NotSharableError, files_named_in, opened
from s3cache.hooks._state import CompileState, Patches
from tests.hooks.triton import KERNEL, bundled, emit
from tests.support.marks import slow
from tests.support.sites import Machine, Site
from tests.support.users import needs_users

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


@pytest.mark.parametrize("torchs", [True, pytest.param(False, marks=slow)])
def test_a_machine_with_a_full_disk_misses_and_does_not_touch_the_entry(
    site: Site, torchs: bool
) -> None:
    found = site.machine("one").run("fx_programs:without_room", site.url, torchs)
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
        (directory,) = shared.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        directory.rename(moved := shared / "moved")
        directory.mkdir()
        (directory / Path(path).name).write_bytes(b"planted")
        assert Path(path).read_bytes() == b"verified"
        (directory / Path(path).name).unlink()
    assert list(moved.iterdir()) == []


def test_nothing_is_left_of_an_image_that_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with opened(b"verified", "kernel") as path:
        assert Path(path).read_bytes() == b"verified"
    assert not Path(path).exists()
    # Other tests' threads open and close files at this time.
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert [file for file in files if file.startswith(str(tmp_path))] == []
    assert list(tmp_path.iterdir()) == []


def test_an_image_is_not_loaded_from_a_directory_that_another_user_may_have_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (planted := tmp_path / "planted").mkdir()
    planted.chmod(0o777)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: str(planted))
    with pytest.raises(PermissionError), opened(b"verified", "kernel"):
        pass


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


# -- triton kernels in entries have no trace of the machine that compiled them, and are loaded from


SHARED_GROUP = 12_003


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return torch's directory for kernels, inside Inductor's directory."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = os.umask(0o002)  # the umask of many machines with several users
    yield tmp_path / "inductor" / "triton" / "0"
    os.umask(before)


def shared_with_a_group(path: Path) -> None:
    os.chown(path, -1, SHARED_GROUP)
    path.chmod(path.stat().st_mode | 0o020)


def moved_behind_a_link(path: Path) -> None:
    there = path.parents[2] / "theirs"
    path.rename(there)
    path.symlink_to(there)


def given_away(path: Path) -> None:
    path.parent.parent.chmod(0o700)
    os.chown(path, 12_002, 12_002)


FILE = f"{KERNEL}/kernel.cubin"


@pytest.mark.parametrize(
    ("where", "change"),
    [
        pytest.param(".", shared_with_a_group, marks=needs_users),
        (".", lambda path: path.chmod(0o757)),
        ("..", lambda path: path.chmod(0o777)),  # any user may rename files in it
        (KERNEL, lambda path: path.chmod(0o777)),
        pytest.param(FILE, shared_with_a_group, marks=needs_users),
        (FILE, lambda path: path.chmod(0o646)),
        (FILE, moved_behind_a_link),
        (KERNEL, moved_behind_a_link),
        pytest.param(FILE, given_away, marks=needs_users),
    ],
)
def test_files_that_other_users_could_have_written_are_not_loaded(
    base: Path, where: str, change: Callable[[Path], object]
) -> None:
    """This machine misses, and the entry stays valid."""
    (base / KERNEL).mkdir(parents=True)
    for above in (base / KERNEL, base, base.parent, base.parent.parent):
        above.chmod(0o755)
    (base / FILE).write_bytes(b"planted")
    (base / FILE).chmod(0o644)
    change(Path(os.path.normpath(base / where)))
    with pytest.raises(PermissionError, match="where others may write") as raised:
        emit()
    assert is_machine_trouble(raised.value)
    emit(rebuilding=False)  # s3cache does not check torch's own entries


def test_kernels_go_to_a_private_directory(base: Path) -> None:
    """Under any umask; and the next hit finds them there."""
    for _ in range(2):
        emit()
        assert (base / KERNEL / "kernel.cubin").read_bytes() == b"verified"
    assert base.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.getegid() != os.geteuid(), reason="this user has no private group")
def test_files_of_this_users_triton_with_umask_002_are_loaded(base: Path) -> None:
    """The group that may write is the user's own, and has no other members."""
    (base / KERNEL).mkdir(parents=True)
    (base / KERNEL / "kernel.cubin").write_bytes(b"compiled here")
    modes = [path.stat().st_mode & 0o777 for path in (base, base / KERNEL)]
    assert modes == [0o775, 0o775]
    assert (base / KERNEL / "kernel.cubin").stat().st_mode & 0o777 == 0o664
    emit()
    assert (base / KERNEL / "kernel.cubin").read_bytes() == b"compiled here"


class Function:
    """A stand-in for Triton's own function of a kernel."""

    def __init__(self, file: str) -> None:
        self.fn = None
        self.file_name = file
        self.device_caches: defaultdict[int, str] = defaultdict(self.create_binder)

    def create_binder(self) -> str:
        return "bound"


SOURCE = "cabc"  # torch names a kernel's file after its content


def static_kernel(directory: Path) -> Any:
    """Return a kernel as torch keeps it for its cache, compiled in ``directory``."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.triton_bundler import StaticallyLaunchedAutotuner

    file = str(directory / "ab" / f"{SOURCE}.py")
    meta = {"autotune_local_cache": True, "autotune_remote_cache": False}
    cache = AutotuneCache.create(meta, file, "configs")  # type: ignore[arg-type]
    assert cache is not None
    kernel: Any = object.__new__(CachingAutotuner)
    vars(kernel).update(
        fn=Function(file),
        filename=file,
        kernel_hash=SOURCE,
        inductor_meta=meta,
        save_cache_hook=cache.save,
        compile_results=[],
        launchers=[print],  # of a kernel that was loaded here
        _plugins=[],
    )
    return StaticallyLaunchedAutotuner("key", "kernel", kernel)


def shared(bundle: Any) -> bytes:
    graph = SimpleNamespace(_triton_bundle=bundle)
    with Kernels(CompileState()).hidden(graph):
        content = pickle.dumps(graph._triton_bundle)
    assert graph._triton_bundle is bundle
    return content


def test_a_kernel_from_another_machine_gets_paths_of_this_machine(
    base: Path, tmp_path: Path
) -> None:
    """Its entry names no file and no bound method of that machine; here it gets new ones."""
    from torch._inductor.async_compile import CompiledTritonKernels

    there = tmp_path / "another machine"
    content = shared(bundled({"kernel.cubin": b"verified"}, static_kernel(there)))
    assert str(tmp_path).encode() not in content
    bundle: Any = unpickle(content)  # it refuses bound methods

    emit(bundle)
    CompiledTritonKernels._cache.pop("key", None)
    kernel = bundle.static_autotuners[0].kernel
    place = base.parents[1] / "ab" / f"{SOURCE}.py"
    assert [kernel.filename, kernel.fn.file_name] == [str(place)] * 2
    assert kernel.fn.device_caches["a device"] == "bound"
    config = SimpleNamespace(kwargs={"XBLOCK": 64}, num_warps=4, num_stages=1)
    kernel.save_cache_hook(config, 1)
    (best,) = place.parent.glob("*.best_config")
    assert json.loads(best.read_bytes())["configs_hash"] == "configs"
    assert not there.exists()


def test_only_the_files_of_a_kernel_that_run_are_shared(base: Path) -> None:
    """Earlier stages name files. Triton ignores a kernel if a listed file is missing."""
    base.mkdir(parents=True)
    base.chmod(0o755)
    here = str(base.parents[1])
    stages = dict.fromkeys(["k.source", "k.ttir", "k.ttgir", "k.llir", "k.ptx"], here.encode())
    group = {"child_paths": {name: f"[REPLACE]/{name}" for name in [*stages, "k.cubin", "k.json"]}}
    files = {
        **stages,
        "k.cubin": b"\0" + here.encode() + b"/ab/cabc.py\0",
        "k.json": json.dumps({"extern_libs": here + "/lib"}).encode(),
        "__grp__k.json": json.dumps(group).encode(),
    }
    content = shared(bundled(files))
    assert here.encode() not in content
    emit(unpickle(content))
    kept = {path.name: path for path in (base / KERNEL).iterdir()}
    assert set(kept) == {"k.cubin", "k.json", "__grp__k.json"}
    listed = json.loads(kept["__grp__k.json"].read_bytes())["child_paths"]
    assert sorted(listed) == ["k.cubin", "k.json"]
    assert all(Path(path).exists() for path in listed.values())
    assert len(kept["k.cubin"].read_bytes()) == len(files["k.cubin"])


def test_a_kernel_without_an_alternative_is_kept_if_another_kernel_was_chosen(base: Path) -> None:
    """torch drops every kernel that was not chosen, even a kernel without an alternative."""
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
    from torch._inductor.triton_bundler import StaticallyLaunchedAutotuner, TritonBundler

    digests = {name: name[0] * 64 for name in ("chosen", "only", "lost")}
    files = {name: triton_hash_to_path_key(digest) for name, digest in digests.items()}
    patches = Patches()
    patches.install(Kernels(CompileState()))
    try:
        TritonBundler.begin_compile()
        for file in files.values():
            (base / file).mkdir(parents=True)
            (base / file / "kernel.cubin").write_bytes(b"code")
            TritonBundler.put(file, 0)
        if hasattr(TritonBundler, "put_winner"):
            TritonBundler.put_winner(files["chosen"])
        result = SimpleNamespace(kernel=SimpleNamespace(hash=digests["only"]))
        kernel: Any = SimpleNamespace(compile_results=[result], kernel_name="only")
        TritonBundler._static_autotuners = [StaticallyLaunchedAutotuner("key", "only", kernel)]
        bundle, _ = TritonBundler.collect()
    finally:
        TritonBundler.end_compile()
        patches.close()
    kept = {artifacts.kernel_hash for artifacts in bundle.kernel_artifacts}
    assert {files["chosen"], files["only"]} <= kept
    assert hasattr(TritonBundler, "put_winner") == (files["lost"] not in kept)
