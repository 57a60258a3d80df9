"""torch's own ``clear()`` means what it says while s3cache is on: this machine forgets."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import pytest

import s3cache
import tests.support.compiler  # noqa: F401
from s3cache import Cache, Hit, Settings, frame
from s3cache.hooks._session import install_clearing
from s3cache.hooks._state import Patches

if TYPE_CHECKING:
    from pathlib import Path

    from s3cache.cache import Engine

AOT, FX, PROFILE = "a" + "1" * 64, "f" + "2" * 64, "p" + "3" * 64


def clear(which: str) -> None:
    """As a user calls it, who imported the class before or after."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._inductor.codecache import FxGraphCache

    {"aot": AOTAutogradCache, "fx": FxGraphCache}[which].clear()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch clears a directory of this test's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def save_all(cache: Cache) -> None:
    for key in (AOT, FX, PROFILE):
        cache.save(key, frame.encode(kind="test", key=key, sections={"s": b"x"}))


def tiers(cache: Cache) -> list[str]:
    outcomes = [cache.lookup(key) for key in (AOT, FX, PROFILE)]
    return [each.tier if isinstance(each, Hit) else str(each.reason) for each in outcomes]


def test_what_this_machine_has_goes_and_the_remote_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "inductor" / "aotautograd").mkdir(parents=True)
    options: Any = {"local_dir": str(tmp_path / "local")}
    with s3cache.enabled(f"file://{tmp_path}/remote?create=1", **options) as cache:
        save_all(cache)
        assert tiers(cache) == ["local"] * 3
        clear("aot")
        assert not (tmp_path / "inductor" / "aotautograd").exists()  # torch's own went as ever
        assert tiers(cache) == ["remote", "local", "local"]
        clear("fx")
        assert tiers(cache) == ["local", "remote", "local"]
    clear("aot")  # no longer ours
    with Cache.open(f"file://{tmp_path}/remote?create=1", **options) as cache:
        assert tiers(cache) == ["local"] * 3


def test_without_a_remote_it_is_a_miss(tmp_path: Path) -> None:
    with s3cache.enabled(local_dir=str(tmp_path / "local")) as cache:
        save_all(cache)
        clear("aot")
        assert tiers(cache) == ["absent", "local", "local"]


def test_entries_that_are_still_to_upload_stay(tmp_path: Path) -> None:
    """A remote that is gone: the entries wait on this disk for it."""
    options: Any = {"local_dir": str(tmp_path / "local"), "exit_timeout_s": 0.1}
    with s3cache.enabled(f"file://{tmp_path}/none?create=false", **options) as cache:
        save_all(cache)
        clear("aot")
        assert isinstance(cache.lookup(AOT), Hit)


@pytest.mark.parametrize("strict", [False, True])
def test_a_disk_that_cannot_do_it_ends_no_program_unless_it_is_strict(
    strict: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        settings = Settings(strict=strict)

        def clear_local(self, _: str) -> int:
            raise OSError("the disk is gone")

    (tmp_path / "inductor" / "fxgraph").mkdir(parents=True)
    patches = Patches()
    install_clearing(cast("Engine", Broken()), patches)
    try:
        with pytest.raises(OSError, match="disk") if strict else nullcontext():
            clear("fx")
    finally:
        patches.undo()
    assert not (tmp_path / "inductor" / "fxgraph").exists()
    assert ("were not removed" in caplog.text) is not strict
