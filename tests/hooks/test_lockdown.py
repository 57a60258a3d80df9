"""If only signed entries may be used, torch gets its own directory."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copyfile

import pytest

import tests.support.compiler  # noqa: F401
from s3cache.hooks._directories import (
    disable_torch_caches,
    fingerprint_of,
    install_lockdown,
    kept_directory,
    remember_installation,
)
from s3cache.hooks._state import Patches
from s3cache.store import private_directory
from s3cache.torch_api import internals
from s3cache.util.threads import DeadlineExecutor
from tests.hooks.triton import KERNEL, bundled, emit
from tests.support.hanging import dead_mount
from tests.support.users import ATTACKER, VICTIM, as_user, begun_as, needs_users
from tests.support.waiting import join_child


@pytest.fixture
def torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set torch's directories, and return their parent."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path


@pytest.fixture
def installed(torchs: Path) -> Iterator[Callable[[str], Patches]]:
    made: list[Patches] = []

    def install(policy: str) -> Patches:
        made.append(Patches())
        install_lockdown(policy, made[-1])
        return made[-1]

    yield install
    for patches in reversed(made):
        patches.close()


def rebuilt_kernel() -> bytes:
    """Rebuild an entry with a kernel; return the content of the file with the kernel's name."""
    emit(bundled({"kernel.cubin": b"signed"}))
    base = internals.triton_directory.get()(0)
    with open(os.path.join(base, KERNEL, "kernel.cubin"), "rb") as file:
        return file.read()


def leave_kernel(base: Path) -> None:
    """Leave a kernel of an entry that was used before signatures were required."""
    (base / KERNEL).mkdir(parents=True, mode=0o700)
    (base / KERNEL / "kernel.cubin").write_bytes(b"betraying")


def test_kernels_that_an_earlier_run_left_for_triton_are_not_loaded(
    torchs: Path, installed: Callable[[str], Patches]
) -> None:
    leave_kernel(torchs / "triton")
    assert rebuilt_kernel() == b"betraying"  # without the lockdown, it is loaded
    patches = installed("policy")
    assert rebuilt_kernel() == b"signed"
    patches.close()
    assert rebuilt_kernel() == b"betraying"


def test_each_policy_has_its_own_directory_and_finds_it_again(
    torchs: Path, installed: Callable[[str], Patches]
) -> None:
    """A policy does not find files of a signer that it no longer trusts."""
    places = []
    for policy in ("one", "two", "one"):
        patches = installed(policy)
        places.append(internals.cache_dir.get()())
        assert os.stat(places[-1]).st_mode & 0o777 == 0o700
        patches.close()
    assert places[0] == places[2] != places[1]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(torchs / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(torchs / "triton")


def replace(place: Path, theirs: Path) -> None:
    """Replace ``place`` by a link to ``theirs``, if this user can."""
    with contextlib.suppress(OSError):
        place.rename(place.with_name("moved"))
    with contextlib.suppress(OSError):
        place.symlink_to(theirs)


def owned_by(directory: Path, user: int, mode: int = 0o755) -> Path:
    directory.mkdir()
    directory.chmod(mode)
    os.chown(directory, user, user)
    return directory


@needs_users
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    "way", ["torch's directory", "Triton's directory", "one above", "a link", "a link to a link"]
)
def test_no_other_user_can_replace_torchs_directory(
    common: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Another user made torch's default directory before its first use, and owns its name."""
    os.chown(common, 0, 0)
    common.chmod(0o1777)
    theirs = owned_by(common / "theirs", ATTACKER)
    (theirs / "code").write_text("betraying")
    monkeypatch.setattr(tempfile, "tempdir", str(common))
    squatted = common / "torchinductor_victim"
    if way.startswith("a link"):  # to a place that is the user's own
        good, other = owned_by(common / "good", VICTIM), owned_by(common / "other", ATTACKER)
        as_user(ATTACKER, lambda: (other / "link").symlink_to(good))
        to = good if way == "a link" else other / "link"
        as_user(ATTACKER if way == "a link" else VICTIM, lambda: squatted.symlink_to(to))
    else:
        owned_by(squatted, ATTACKER, 0o1777)
    inside = owned_by(squatted / "inside", VICTIM) if way == "one above" else squatted
    for variable in internals.DIRECTORIES:
        monkeypatch.delenv(variable, raising=False)
    triton = way == "Triton's directory"
    monkeypatch.setenv("TRITON_CACHE_DIR" if triton else "TORCHINDUCTOR_CACHE_DIR", str(inside))
    if triton:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(owned_by(common / "own", VICTIM)))
    ready, go = os.pipe(), os.pipe()

    def use() -> None:
        patches = Patches()
        install_lockdown("policy", patches)
        given = internals.triton_directory.get()(0) if triton else internals.cache_dir.get()()
        os.makedirs(given, exist_ok=True)
        for name in ("code", "given"):
            with open(os.path.join(given, name), "w") as file:
                file.write("signed" if name == "code" else given)
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        with open(os.path.join(given, "code")) as file:
            assert file.read() == "signed"
        patches.close()

    def attack() -> None:
        for place in (inside / "s3cache-policy", inside, squatted, theirs.with_name("link")):
            replace(place, theirs)
        with contextlib.suppress(OSError):
            (common / "other" / "link").unlink()
            (common / "other" / "link").symlink_to(theirs)
        if way == "a link":
            squatted.unlink()
            squatted.symlink_to(theirs)
        (theirs / "s3cache-policy").symlink_to(theirs)

    target = begun_as(VICTIM, use)
    os.read(ready[0], 1)
    as_user(ATTACKER, attack)
    os.write(go[1], b"x")
    assert join_child(target) == 0
    for fd in (*ready, *go):
        os.close(fd)


@needs_users
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_torch_does_not_use_a_temporary_directory_of_another_user(
    common: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner can rename anything in it, so torch's directory of this process is elsewhere."""
    common.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(common))

    def use() -> None:
        for make in (lambda: kept_directory(str(common / "torchs")), private_directory):
            place, forget = make()
            assert not place.startswith(str(common))
            assert os.stat(place).st_mode & 0o777 == 0o700
            forget()

    as_user(VICTIM, use)


def test_with_a_file_in_place_of_its_directory_torch_gets_a_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Callable[[str], Patches]
) -> None:
    """Any user can make such a file in the shared temporary directory."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    installed("policy")
    place = internals.cache_dir.get()()
    assert os.stat(place).st_mode & 0o777 == 0o700


def test_without_hooks_torch_has_no_caches_and_a_temporary_directory(
    torchs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if none was set. Closing the patches restores everything."""
    monkeypatch.delenv("TRITON_CACHE_DIR")
    leave_kernel(torchs / "inductor" / "triton" / "0")
    patches = Patches()
    disable_torch_caches(patches)
    made = [os.environ[variable] for variable in internals.DIRECTORIES]
    assert internals.force_disable_caches.get() is True
    assert os.environ[internals.NO_CACHES] == "1"  # child processes have none either
    assert len(set(made)) == 2
    for path in made:
        assert os.stat(path).st_mode & 0o777 == 0o700
        assert os.listdir(path) == []
    patches.close()
    assert internals.force_disable_caches.get() is False
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(torchs / "inductor")
    assert "TRITON_CACHE_DIR" not in os.environ
    assert internals.NO_CACHES not in os.environ
    assert not any(map(os.path.exists, made))


# -- results of an earlier process are used only from a file that is this user's own


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the keys that s3cache sets in torch."""
    keys: list[bytes] = []
    monkeypatch.setattr(internals.set_key, "get", lambda: keys.append)
    return keys


def forged(directory: Path) -> Path:
    """Write a file that fits this installation, with another key in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals.torch_key, "get", lambda: lambda: bytes(32))
        remember_installation(str(directory))
    (path,) = directory.glob("installation")
    return path


def test_a_second_process_computes_nothing(tmp_path: Path, given: list[bytes]) -> None:
    path = forged(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    remember_installation(str(tmp_path))
    assert given == [bytes(32)]


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a pipe": lambda path, aside: os.mkfifo(path),
    "a link": lambda path, aside: path.symlink_to(aside),
    "a second name": lambda path, aside: os.link(aside, path),
    "a file without an end": lambda path, aside: os.truncate(copyfile(aside, path), 1 << 40),
    "of another installation": lambda path, aside: path.write_text(
        json.dumps({**json.loads(aside.read_bytes()), "digest": "0" * 64})
    ),
    "no JSON": lambda path, aside: path.write_bytes(aside.read_bytes()[:-1]),
}
BY_ROOT: dict[str, Callable[[Path, Path], object]] = {
    "of another user": lambda path, aside: os.chown(copyfile(aside, path), 12_002, 12_002),
    "/dev/zero": lambda path, _: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
}


@pytest.mark.parametrize(
    "what", [*PLANTED, *(pytest.param(each, marks=needs_users) for each in BY_ROOT)]
)
def test_a_file_that_other_users_may_have_written_is_not_used(
    what: str, tmp_path: Path, given: list[bytes]
) -> None:
    """s3cache does not wait for the file, and replaces it."""
    (root := tmp_path / "root").mkdir(mode=0o700)
    path = forged(root)
    path.rename(aside := tmp_path / "aside")
    before = aside.read_bytes()
    {**PLANTED, **BY_ROOT}[what](path, aside)
    remember_installation(str(root))
    assert given == []
    assert aside.read_bytes() == before
    assert os.listdir(root) == ["installation"]
    assert json.loads(path.read_bytes())["key"] != "00" * 32
    remember_installation(str(root))
    assert len(given) == 1


@pytest.mark.parametrize("theirs", ["a link", "open to others", "a file", "missing"])
def test_no_file_is_kept_in_a_directory_that_other_users_may_write_to(
    theirs: str, tmp_path: Path, given: list[bytes]
) -> None:
    root, target = tmp_path / "root", tmp_path / "target"
    target.mkdir(mode=0o700)
    forged(target)
    if theirs == "a link":
        root.symlink_to(target)
    elif theirs == "open to others":
        target.rename(root)
        root.chmod(0o777)
    elif theirs == "a file":
        root.write_bytes(b"")
    before = sorted(os.listdir(tmp_path))
    remember_installation(str(root))
    assert given == []
    assert sorted(os.listdir(tmp_path)) == before


def test_a_disk_that_hangs_is_not_waited_for(
    tmp_path: Path, given: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeadlineExecutor, "limit_s", 0.3)
    (dead := tmp_path / "dead").mkdir()
    with dead_mount(dead):
        remember_installation(str(dead))  # hangs here if it waits
    assert given == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "another size": lambda root: (root / "sub/b.py").write_text("longer than it was"),
    "another time": lambda root: os.utime(root / "sub/b.py", ns=(10**18, 10**18 + 1)),
    "one more": lambda root: (root / "sub/new.py").write_text(""),
    "one less": lambda root: (root / "sub/b.py").unlink(),
    "another name": lambda root: (root / "a.py").rename(root / "z.py"),
    "a link to nothing": lambda root: (root / "gone.py").symlink_to(root / "nowhere"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_installation_is_seen(change: str, tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", "sub/note.txt", "lib/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    before = fingerprint_of(str(tmp_path))
    (tmp_path / "sub/note.txt").write_text("no source")
    (tmp_path / "lib/e.py").write_text("nor is this one of torch's")
    assert fingerprint_of(str(tmp_path)) == before
    CHANGES[change](tmp_path)
    assert fingerprint_of(str(tmp_path)) != before
