"""A job: mistakes in each hook, while programs compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.hooks.switches import Counted, compiled


class InjectedError(Exception):
    """What a fault raises, so that nothing else is taken for it."""


def _raise(*_: Any, **__: Any) -> Any:
    raise InjectedError("injected")


@contextlib.contextmanager
def _broken(owner: Any, name: str) -> Iterator[None]:
    old = vars(owner)[name]
    setattr(owner, name, _raise)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _hooks() -> dict[str, tuple[Any, str]]:
    """What to break in each hook."""
    from s3cache.artifact import Artifact
    from s3cache.cache import Engine
    from s3cache.hooks import _compiles, _keys

    return {
        "key": (_keys, "bypass_reasons"),
        "fx key": (_keys, "fx_bypass_reasons"),
        "lookup": (Engine, "candidates"),
        "candidate": (Artifact, "entry_of"),
        "rebuild": (Artifact, "kernels_of"),
        "save": (Artifact, "encode"),
        "describe": (_compiles, "describe"),
        "begin": (_compiles.Compile, "__init__"),
        "note fx": (_compiles, "reads_storage_offsets"),
        "note": (_compiles, "note_conditions"),
    }


def _faults(url: str, strict: bool) -> dict[str, Any]:
    """For each hook: what a program sees of it, and the counts."""
    import torch

    import s3cache
    from s3cache.hooks._conditions import NotSharableError

    cache = s3cache.enable(url, strict=strict)
    counted = Counted(cache)
    found: dict[str, Any] = {}
    for number, (name, (owner, attribute)) in enumerate(_hooks().items()):
        size = 4 + number
        if name in ("lookup", "candidate", "rebuild"):
            assert compiled(size, grad=True)  # so that there is a hit to break
        counted.step("")
        with _broken(owner, attribute):
            try:
                found[name] = compiled(size, grad=True)
            except (
                InjectedError,
                NotSharableError,
                torch._dynamo.exc.BackendCompilerFailed,
            ) as exc:
                found[name] = f"{type(exc).__name__} {'injected' in str(exc)}"
        counted.step(name)
        found[name + " after"] = compiled(size, grad=True)
        counted.step(name + " after")
    s3cache.disable()
    return {"found": found, "steps": counted.steps}


def _bypass(url: str, strict: bool) -> dict[str, Any]:
    """A graph that cannot be cached, and one that can."""
    import torch

    import s3cache

    @torch._dynamo.allow_in_graph
    def opaque(x: Any) -> Any:
        return x @ x

    def function(x: Any, y: Any) -> Any:
        return opaque(x @ y)

    cache = s3cache.enable(url, strict=strict)
    counted = Counted(cache)
    found: dict[str, Any] = {}
    for name in ("function", "again"):
        try:
            found[name] = compiled(20, function)
        except torch._dynamo.exc.BackendCompilerFailed as exc:
            found[name] = str(exc)
        counted.step(name)
    found["product"] = compiled(20)
    counted.step("product")
    stats = cache.stats()
    s3cache.disable()
    return {"found": found, "steps": counted.steps, "reasons": dict(stats.bypass_reasons)}


def all_faults(url: str, strict: bool) -> dict[str, Any]:
    """Both, in one process."""
    return {"faults": _faults(url, strict), "bypass": _bypass(url, strict)}
