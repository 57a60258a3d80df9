"""A job with a fault in each hook while programs compile."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import s3cache
from s3cache.artifact import Artifact
from s3cache.cache import Engine
from s3cache.hooks import _compiles, _lookups, _state
from s3cache.hooks._rebuild import NotSharableError
from tests.hooks.switches import Counted, compiled, unknown


class InjectedError(Exception):
    """The error of injected faults; no other code raises it."""


def _raise(*_: Any, **__: Any) -> Any:
    raise InjectedError("injected")


# The function to break in each hook.
HOOKS: dict[str, tuple[Any, str]] = {
    "key": (_state, "bypass_reasons"),
    "fx key": (_state, "fx_bypass_reasons"),
    "lookup": (Engine, "candidates"),
    "candidate": (_lookups, "section_of"),
    "rebuild": (Artifact, "kernels_of"),
    "save": (Artifact, "encode"),
    "describe": (_compiles, "describe"),
    "begin": (_compiles.Compile, "__init__"),
    "note fx": (_compiles, "reads_storage_offsets"),
    "note": (_compiles, "note_conditions"),
}


def faults(url: str, strict: bool) -> dict[str, Any]:
    """Break each hook in turn; return the program's outcomes and the counts."""
    cache = s3cache.enable(url, strict=strict)
    counted = Counted(cache)
    found: dict[str, Any] = {}
    for number, (name, (owner, attribute)) in enumerate(HOOKS.items()):
        size = 4 + number
        if name in ("lookup", "candidate", "rebuild"):
            assert compiled(size, grad=True)  # so that there is a hit to break
        counted.step("")
        with mock.patch.object(owner, attribute, _raise):
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
    return {"found": found, "steps": counted.steps, "bypassed": _bypassed(url) if strict else {}}


def _bypassed(url: str) -> dict[str, Any]:
    """Compile a graph that cannot be cached, and one that can, in strict mode."""
    with s3cache.enabled(url, strict=True) as cache:
        found = []
        for _ in range(2):
            try:
                compiled(20, unknown)
            except torch._dynamo.exc.BackendCompilerFailed as exc:
                found.append(str(exc))
        product = compiled(20)
        return {"raised": found, "product": product, "reasons": dict(cache.stats().bypass_reasons)}
