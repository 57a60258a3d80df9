"""Turning s3cache on and off, from any thread, before and after torch."""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

import pytest

from tests.hooks.jobs import account
from tests.hooks.switches import compiled
from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


def test_disable_restores_torch(site: Site) -> None:
    """Each function of torch's compiler is the same object as before; options are unchanged."""
    ran = site.machine("one").run("test_life:on_and_off", site.url)
    assert any("try_load" in name for name in ran["during"])  # so a difference would be seen
    assert ran["during_again"] == ran["during"]
    assert ran["after"] == []
    assert ran["finders"]
    assert ran["hits"] == [1, 1]
    assert not ran["active"]


@slow
def test_enable_before_torch_affects_all_threads_and_forked_children(site: Site) -> None:
    """``enable()`` does not import torch, and affects all threads."""
    site.forks = False  # the job imports torch
    ran = site.machine("one").run("test_life:before_torch", site.url)
    assert not ran["torch"]
    assert not ran["compiler"]
    assert ran["loader"].startswith(("importlib", "_frozen_importlib"))
    assert ran["thread"] == [True]
    assert ran["parent"]["saved"] == ran["parent"]["misses"]["absent"] == 1
    assert sum(ran["parent"]["hits"].values()) == 1
    # The parent's graph, and the child's own graph; the counts are the child's own.
    assert ran["child"] == "ok 1 1"


@slow
def test_enable_without_an_effect(site: Site) -> None:
    """The cache is disabled before torch is imported, or torch is too old (one warning)."""
    site.forks = False  # the job imports torch
    ran = site.machine("one").run("test_life:without_effect", site.url)
    assert ran["during"]
    assert ran["after"]
    assert ran["modes"] == ["off", "off"]  # caches that do nothing
    assert not ran["active"]
    assert ran["torch"]["autograd_cache_saved"] == 2  # by torch itself
    assert ran["stderr"].count("is not supported") == 1
    assert site.entries() == []


# -- the job


_PACKAGES = ("torch._functorch", "torch._inductor", "torch._dynamo", "torch.compiler", "torch.fx")


def _functions() -> dict[str, tuple[int, object]]:
    """Return the id of every function of torch's compiler, in modules and in classes.

    Each id comes with its object, so that the object stays alive and the id unique.
    """
    kinds = (types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)
    found: dict[str, tuple[int, object]] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGES):
            for key, value in list(vars(module).items()):
                if isinstance(value, kinds):
                    found[f"{name}.{key}"] = id(value), value
                elif isinstance(value, type) and value.__module__ == name:
                    for inner, each in vars(value).items():
                        if isinstance(each, kinds):
                            found[f"{name}.{key}.{inner}"] = id(each), each
    return found


def _configs() -> dict[str, object]:
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return {**functorch.get_config_copy(), **inductor.get_config_copy()}


def on_and_off(url: str) -> dict[str, Any]:
    """Return the differences in torch while s3cache is enabled, and after ``disable()``."""
    import torch
    import torch._inductor.compile_fx  # noqa: F401 - the whole compiler

    import s3cache

    compiled(5)  # torch sets up some state at its first use
    functions, configs, finders = _functions(), _configs(), list(sys.meta_path)

    def differ() -> list[str]:
        now = _functions()
        changed = [name for name, (found, _) in functions.items() if now[name][0] != found]
        changed += [name for name in now if name not in functions and "s3cache" in repr(now[name])]
        return changed + [name for name, value in _configs().items() if configs[name] != value]

    hits = []
    with s3cache.enabled(url) as cache:
        during = differ()
        assert compiled(6)
        assert compiled(6)
        hits.append(sum(account(cache)["hits"].values()))
    first = differ()
    s3cache.enable(url)
    again = s3cache.enable(url)  # replaces it
    assert again is s3cache.active()
    during_again = differ()
    assert compiled(6)
    hits.append(sum(account(again)["hits"].values()))
    s3cache.disable()
    s3cache.disable()
    assert compiled(6)
    return {
        "during": during,
        "during_again": during_again,
        "after": [*first, *differ()],
        "finders": sys.meta_path == finders,
        "hits": hits,
        "active": s3cache.active() is not None,
    }


def before_torch(url: str) -> dict[str, Any]:
    """Enable before torch is imported; compile in another thread and in a forked child."""
    import s3cache

    threading.Thread(target=s3cache.enable, args=(url,)).start()
    while (cache := s3cache.active()) is None:
        pass
    found: dict[str, Any] = {"torch": "torch" in sys.modules}
    import torch

    found["compiler"] = "torch._inductor.compile_fx" in sys.modules
    assert compiled(5, grad=True)
    loader = torch._inductor.compile_fx.__spec__.loader
    found["loader"] = type(loader).__module__
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(compiled(5, grad=True)))
    thread.start()
    thread.join()
    found["thread"] = results
    found["parent"] = account(cache)

    assert compiled(6)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            # No backward: torch with CUDA cannot run one in a child.
            os.write(writer, b"ok" if compiled(6) and compiled(7) else b"wrong")
            stats = cache.stats()
            os.write(writer, f" {sum(stats.hits.values())} {stats.saved}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        found["child"] = file.read()
    s3cache.disable()
    return found


def without_effect(url: str) -> dict[str, Any]:
    """Disable before torch's compiler is imported; then enable with a torch that is too old."""
    import s3cache
    from s3cache.torch_api import internals

    before = list(sys.meta_path)
    with s3cache.enabled(url):
        during = sys.meta_path != before
    found: dict[str, Any] = {"during": during, "after": sys.meta_path == before}
    assert compiled(4)

    internals.OLDEST = (99, 0)
    first, second = s3cache.enable(url), s3cache.enable(url)
    assert compiled(5)
    from torch._dynamo.utils import counters

    return {
        **found,
        "modes": [first.settings.mode, second.settings.mode],
        "active": s3cache.active() is not None,
        "torch": dict(counters["aot_autograd"]),
    }


def test_a_pool_that_is_forked_after_its_parent_compiled_compiles(site: Site) -> None:
    """The children lack the threads with which torch waits for compilers."""
    ran = site.machine("one").run("healing:fork_a_pool", site.url)
    assert ran["codes"] == [0, 0]
    assert ran["seconds"] < 60
