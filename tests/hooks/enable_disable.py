"""Jobs about turning s3cache on and off."""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

from tests.hooks.jobs import account
from tests.hooks.switches import compiled

_PACKAGES = ("torch._functorch", "torch._inductor", "torch._dynamo", "torch.compiler", "torch.fx")


def _functions() -> dict[str, tuple[int, object]]:
    """Identity of every function that torch's compiler has, in modules and in classes.

    With the object itself, so that it stays alive and its identity its own.
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
    """What differs in torch after ``disable()``, and while it is enabled."""
    import torch
    import torch._inductor.compile_fx  # noqa: F401 - the whole compiler

    import s3cache

    compiled(5)  # whatever torch sets up by itself at first use
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
    """Enabled before torch is there; used by another thread, and by a forked child."""
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
    """Disabled before torch's compiler was ever imported; then, a torch that is too old."""
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
