"""``torch.compile(model, backend="s3cache")``: Inductor with the cache, configured by environment.

torch finds this through the entry point group ``torch_dynamo_backends``; nothing has to import us.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from s3cache.errors import ConfigError
from s3cache.hooks._session import active, enable

__all__ = ["s3cache"]

logger = logging.getLogger("s3cache")

_mutex = threading.Lock()
_tried = False


def s3cache(
    gm: Any,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile with Inductor; ``mode`` and ``options`` are those of ``torch.compile``."""
    import torch

    _enable_once()
    # What ``backend="inductor"`` stands for; it checks mode and options.
    inductor: Any = torch._TorchCompileInductorWrapper
    return cast("Callable[..., Any]", inductor(mode, options, None)(gm, example_inputs))


def _enable_once() -> None:
    global _tried
    with _mutex:
        if _tried or active() is not None:
            return
        _tried = True
        try:
            enable()
        except ConfigError as exc:
            logger.warning("s3cache: not enabled, so this compiles without a cache: %s", exc)
