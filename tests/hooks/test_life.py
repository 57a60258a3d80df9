"""Turning s3cache on and off, from any thread, before and after torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.marks import slow

if TYPE_CHECKING:
    from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


def test_disable_puts_everything_back(site: Site) -> None:
    """Every function of torch's compiler is the very object it was, every option what it was."""
    ran = site.machine("one").run("enable_disable:on_and_off", site.url)
    assert any("try_load" in name for name in ran["during"])  # so a difference would be seen
    assert ran["during_again"] == ran["during"]
    assert ran["after"] == []
    assert ran["finders"]
    assert ran["hits"] == [1, 1]
    assert not ran["active"]


def test_enabled_before_torch_for_all_threads_and_forked_children(site: Site) -> None:
    """``enable()`` imports no torch, and its effect is not the calling thread's alone."""
    ran = site.machine("one").run("enable_disable:before_torch", site.url)
    assert not ran["torch"]
    assert not ran["compiler"]
    assert ran["loader"].startswith(("importlib", "_frozen_importlib"))
    assert ran["thread"] == [True]
    assert ran["parent"]["saved"] == ran["parent"]["misses"]["absent"] == 1
    assert sum(ran["parent"]["hits"].values()) == 1
    # A graph of its own, and the parent's; the counts are the child's own.
    assert ran["child"] == "ok 1 1"


@slow
def test_without_effect(site: Site) -> None:
    """Disabled before torch is there; or a torch that is too old: one warning, no more."""
    ran = site.machine("one").run("enable_disable:without_effect", site.url)
    assert ran["during"]
    assert ran["after"]
    assert ran["modes"] == ["off", "off"]  # caches that do nothing
    assert not ran["active"]
    assert ran["torch"]["autograd_cache_saved"] == 2  # by torch itself
    assert ran["stderr"].count("is not supported") == 1
    assert site.entries() == []
