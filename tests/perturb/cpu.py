"""Jobs for other processes: what cannot be changed in this one."""

from __future__ import annotations

from typing import Any

import torch

from tests.perturb.bases import BASES
from tests.perturb.program import keys

__all__ = ["keys_here"]

_PROGRAMS = ("pointwise", "normed", "mlp")


def keys_here() -> dict[str, Any]:
    """Our keys of some programs, torch's own, and what torch takes the processor for."""
    return {
        "ours": {name: keys(BASES[name]) for name in _PROGRAMS},
        "torch's": _torchs_keys(),
        "capability": torch._C._get_cpu_capability(),
    }


def _torchs_keys() -> dict[str, str]:
    from torch._functorch._aot_autograd import autograd_cache

    found: dict[str, str] = {}
    cache: Any = autograd_cache.AOTAutogradCache
    original = cache.try_load
    for name in _PROGRAMS:

        def try_load(mod: Any, args: Any, config: Any, *rest: Any, **kwargs: Any) -> Any:
            found[name] = autograd_cache.autograd_cache_key(mod, args, config, *rest[:1])[0]  # noqa: B023
            return (lambda inputs: mod(*inputs)), config

        cache.try_load = staticmethod(try_load)
        try:
            function, args = BASES[name].make()
            torch.compile(function)(*args)
        finally:
            cache.try_load = original
            torch._dynamo.reset()
    return found
