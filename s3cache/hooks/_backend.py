"""``torch.compile(model, backend="s3cache")``: Inductor with the cache, configured by environment.

torch finds this through the entry point group ``torch_dynamo_backends``; nothing has to import us.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from s3cache.errors import ConfigError
from s3cache.hooks._session import active, enable
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import Function

__all__ = ["s3cache"]

logger = logging.getLogger("s3cache")

_mutex = threading.Lock()
_tried = False


def s3cache(
    gm: GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Function[object]:
    """Compile with Inductor; ``mode`` and ``options`` are those of ``torch.compile``."""
    _enable_once()
    # What ``backend="inductor"`` stands for; it checks mode and options.
    return internals.inductor_backend.get()(mode, options, None)(gm, example_inputs)


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
