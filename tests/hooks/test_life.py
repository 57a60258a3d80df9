"""Turning s3cache on and off, from any thread, before and after torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.density import dense

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


def test_disable_puts_everything_back(site: Site) -> None:
    """Every function of torch's compiler is the very object it was, every option what it was."""
    ran = site.machine("one").run("life:on_and_off", site.url)
    assert any("try_load" in name for name in ran["during"])  # so a difference would be seen
    assert ran["during_again"] == ran["during"]
    assert ran["after"] == []
    assert ran["finders"]
    assert ran["hits"] == [1, 1]
    assert not ran["active"]


def test_enabled_before_torch_for_all_threads_and_forked_children(site: Site) -> None:
    """``enable()`` imports no torch, and its effect is not the calling thread's alone."""
    ran = site.machine("one").run("life:before_torch", site.url)
    assert not ran["torch"]
    assert not ran["compiler"]
    assert ran["loader"].startswith(("importlib", "_frozen_importlib"))
    assert ran["thread"] == [True]
    assert ran["parent"]["saved"] == ran["parent"]["misses"]["absent"] == 1
    assert sum(ran["parent"]["hits"].values()) == 1
    # A graph of its own, and the parent's; the counts are the child's own.
    assert ran["child"] == "ok 1 1"


def test_without_effect(site: Site) -> None:
    """Disabled before torch is there; or a torch that is too old: one warning, no more."""
    ran = site.machine("one").run("life:without_effect", site.url)
    assert ran["during"]
    assert ran["after"]
    assert ran["modes"] == ["off", "off"]  # caches that do nothing
    assert not ran["active"]
    assert ran["torch"]["autograd_cache_saved"] == 2  # by torch itself
    assert ran["stderr"].count("is not supported") == 1
    assert site.entries() == []


@dense
def test_a_hit_extends_timeouts_and_says_what_it_saved(
    written: Callable[..., tuple[Site, Any]],
) -> None:
    """As torch does for a hit of its own: by the whole seconds that compiling took."""
    site, _ = written("train", TORCHINDUCTOR_VEC_ISA_OK="")
    timeout = site.machine("timeout", PATH="", TORCHINDUCTOR_VEC_ISA_OK="")
    ran = timeout.run("life:timeout", site.url)
    assert ran["hits"] == {"local": 0, "remote": 2}
    said = [float(each.split(", ")[1].split()[0]) for each in ran["messages"] if "hit" in each]
    assert len(said) == len(ran["added_s"]) == 2
    assert ran["time_saved_s"] == pytest.approx(sum(said), abs=0.2)
    assert all(whole <= s < whole + 1.1 for whole, s in zip(ran["added_s"], said, strict=True))
    assert all(whole == int(whole) for whole in ran["added_s"])
