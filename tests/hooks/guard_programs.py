"""Jobs with compiled code that relies on more than its key."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import config as inductor

from s3cache.hooks import _again, _rebuild
from s3cache.torch_api import internals
from tests.hooks.jobs import account, machine_here


def cubed(x: Any) -> Any:
    return (x.half() * x.half() * 1.1).float().sin() * x


def times(x: Any) -> Any:
    """A program with a backward that reuses the memory of saved tensors."""
    return (x @ x.t()).tanh() @ x


def sliced(x: Any) -> Any:
    """A program with a backward that begins with zeros, which have no inputs."""
    return (x[:3].half() * x[1:4].half() * 1.1).float().sin() * x[:3]


PROGRAMS = {each.__name__: each for each in (cubed, times, sliced)}


def backwards(remote: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take training steps, each on a fresh machine, with the remote at ``remote/SITE``.

    In a step, ``casts`` is a setting during its backward, ``fault`` names a function that fails
    then, ``late`` keeps the backward from being lowered early, ``kept`` runs two backwards, and
    ``options`` gives options to ``torch.compile``.
    """
    seen: list[str] = []
    logger = logging.getLogger("s3cache")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    found = []
    for number, step in enumerate(steps):
        seen.clear()
        site = step.pop("site")
        with machine_here(f"{remote}/{site}?create=1", f"{number}") as cache:
            grad = _step(**step)
            cache.flush()
            counts = account(cache)
        found.append(
            {
                "grad": grad,
                "again": sum("lowered again, under" in line for line in seen),
                "uncompiled": sum("runs uncompiled" in line for line in seen),
                "hits": sum(counts["hits"].values()),
                "second level hits": counts["inductor"].get("fxgraph_cache_hit", 0),
                "lowered": counts["inductor"].get("fxgraph_cache_miss", 0),
                "saved": counts["saved"],
            }
        )
    return found


def _step(
    casts: bool = False,
    kept: bool = False,
    fault: str = "",
    late: bool = False,
    options: bool = False,
    program: str = "cubed",
) -> Any:
    given = {"options": {"max_fusion_size": 3}} if options else {}
    compiled: Any = torch.compile(PROGRAMS[program], **given)  # type: ignore[call-overload]
    x = torch.linspace(-2, 3, 48).view(6, 8).requires_grad_()
    injected = OSError("injected")
    with patch.object(internals, "copied", side_effect=injected) if late else nullcontext():
        out = compiled(x)
    owner = _again if fault == "_new_trace" else _rebuild
    broken = patch.object(owner, fault, side_effect=injected) if fault else nullcontext()
    with inductor.patch(emulate_precision_casts=casts), broken:
        out.sum().backward(retain_graph=kept)
        if kept:
            out.sum().backward()
    assert x.grad is not None
    return x.grad.tolist()
