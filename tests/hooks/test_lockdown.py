"""If only signed entries may be used, torch gets a directory of its own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tests.support.compiler  # noqa: F401
from s3cache.hooks._directories import disable_torch_caches, install_lockdown, kept_directory
from s3cache.hooks._kernels import private_directory
from s3cache.hooks._keys import Patches
from s3cache.torch_api import internals
from tests.hooks.triton import KERNEL, bundled, emit
from tests.support.users import ATTACKER, VICTIM, as_user, begun_as, needs_users
from tests.support.waiting import join_child


@pytest.fixture
def torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its directories, as somebody has set them."""
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


def emitted() -> bytes:
    """What is under a kernel's name once an entry that has it was rebuilt."""
    emit(bundled({"kernel.cubin": b"signed"}))
    base = internals.triton_directory.get()(0)
    with open(os.path.join(base, KERNEL, "kernel.cubin"), "rb") as file:
        return file.read()


def left(base: Path) -> None:
    """A kernel of an entry that was used before signatures were required."""
    (base / KERNEL).mkdir(parents=True, mode=0o700)
    (base / KERNEL / "kernel.cubin").write_bytes(b"betraying")


def test_kernels_of_triton_that_were_left_are_not_loaded(
    torchs: Path, installed: Callable[[str], Patches]
) -> None:
    left(torchs / "triton")
    assert emitted() == b"betraying"  # so it would be
    patches = installed("policy")
    assert emitted() == b"signed"
    patches.close()
    assert emitted() == b"betraying"


def test_each_policy_has_its_own_and_finds_it_again(
    torchs: Path, installed: Callable[[str], Patches]
) -> None:
    """What a signer has left who is trusted no longer is not found by those who do not."""
    places = []
    for policy in ("one", "two", "one"):
        patches = installed(policy)
        places.append(internals.cache_dir.get()())
        assert os.stat(places[-1]).st_mode & 0o777 == 0o700
        patches.close()
    assert places[0] == places[2] != places[1]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(torchs / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(torchs / "triton")


def exchange(place: Path, theirs: Path) -> None:
    """Have whatever lies at ``place`` be ``theirs`` from now on, if this user can."""
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
def test_no_other_user_can_exchange_what_torch_is_given(
    common: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """They made the directory that torch's default is in before its first use, and own its name."""
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
            exchange(place, theirs)
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
def test_a_temporary_directory_that_another_user_owns_is_none_of_torchs(
    common: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in it keeps its name: torch's directory of this process is elsewhere."""
    common.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(common))

    def use() -> None:
        for make in (lambda: kept_directory(str(common / "torchs")), private_directory):
            place, forget = make()
            assert not place.startswith(str(common))
            assert os.stat(place).st_mode & 0o777 == 0o700
            forget()

    as_user(VICTIM, use)


def test_a_file_where_torchs_directory_is_to_be_costs_no_more_than_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Callable[[str], Patches]
) -> None:
    """Anybody can make one in the common temporary directory."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    installed("policy")
    place = internals.cache_dir.get()()
    assert os.stat(place).st_mode & 0o777 == 0o700


def test_without_hooks_torch_has_no_caches_and_a_temporary_directory(
    torchs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if none was set; all is as before in the end."""
    monkeypatch.delenv("TRITON_CACHE_DIR")
    left(torchs / "inductor" / "triton" / "0")
    patches = Patches()
    disable_torch_caches(patches)
    made = [os.environ[variable] for variable in internals.DIRECTORIES]
    assert internals.force_disable_caches.get() is True
    assert os.environ[internals.NO_CACHES] == "1"  # processes that are started have none either
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
