"""A program that misses, hits, and is bypassed, and says what was recorded of it."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch


def mine(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def function(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def unknown(x: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    return mine(y) + 2  # the line


def lookups(url: str) -> dict[str, list[dict[str, Any]]]:
    """By settings: the records of a miss, a hit and a bypass, each in a cache of its own."""
    import s3cache
    from s3cache.cache import recorded

    torch.compiler.allow_in_graph(mine)
    logger = logging.getLogger("s3cache")
    logger.setLevel(logging.DEBUG)
    handler = logging.StreamHandler()  # to stderr
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    found: dict[str, list[dict[str, Any]]] = {}
    settings: dict[str, dict[str, Any]] = {
        "miss": {},
        "hit": {},
        "bypass": {},
        "later": {},
        "memory": {"local": False},
        "off": {"record": False},
    }
    for name, given in settings.items():
        torch._dynamo.reset()
        with s3cache.enabled(url, **given) as cache:
            called = torch.compile(unknown if name == "bypass" else function)
            called(torch.ones(4))  # called here
            if name == "later":  # after a hit, what nobody has saved
                torch.compile(torch.sin, dynamic=False)(torch.ones(5))
            cache.flush(60)
        run = recorded()
        assert run is not None
        found[name] = [record.as_dict() for record in run.records]
    return found


def refused() -> list[dict[str, Any]]:
    """The records of a graph that torch cannot pickle once it is compiled."""
    import s3cache
    from s3cache.cache import recorded
    from s3cache.torch_api import internals

    owner, name = internals.pickle_entry.owner()
    original = vars(owner)[name]
    setattr(owner, name, staticmethod(lambda *_, **__: None))
    with s3cache.enabled("memory://refused", local=False):
        torch.compile(function)(torch.ones(4))
    setattr(owner, name, original)
    torch._dynamo.reset()
    run = recorded()
    assert run is not None
    return [record.as_dict() for record in run.records if record.level == "aot"]


class Restoring:
    """Has code of the program's run while it is read."""

    def __setstate__(self, state: object) -> None:
        raise AssertionError("an entry is read without it")


def unshared(url: str) -> dict[str, Any]:
    """Both kinds of compiled graphs that no entry can hold."""
    return {"refused": refused(), "unreadable": unreadable(url)}


def unreadable(url: str) -> dict[str, Any]:
    """By level: the bypasses of compiled graphs that hold what no process would read."""
    import s3cache
    from s3cache.torch_api import internals

    def holding(hook: Any, at: int) -> None:
        owner, name = hook.owner()
        original = getattr(owner, name)

        @functools.wraps(original)
        def with_what_restores(*args: Any, **kwargs: Any) -> Any:
            vars(args[at])["note"] = note = Restoring()
            vars(note)["x"] = 1
            return original(*args, **kwargs)

        setattr(owner, name, staticmethod(with_what_restores))

    holding(internals.pickle_entry, 0)
    holding(internals.fx_save, 1)
    torch.compiler.allow_in_graph(mine)
    with s3cache.enabled(url) as cache:
        torch.compile(function)(torch.ones(4))
        torch.compile(unknown)(torch.ones(4))  # its key is at the second level alone
        cache.flush(60)
        stats = cache.stats()
    return {
        "aot": dict(stats.bypass_reasons),
        "fx": dict(stats.fx.bypass_reasons),
        "saved": stats.saved,
        "saved_fx": stats.fx.saved,
    }
