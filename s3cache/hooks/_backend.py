"""``torch.compile(model, backend="s3cache")``: Inductor with the cache, configured by environment.

torch finds this through the entry point group ``torch_dynamo_backends``; nothing has to import us.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from s3cache.errors import ConfigError
from s3cache.hooks._session import active, enable

__all__ = ["s3cache"]

logger = logging.getLogger("s3cache")

_tried = False


def s3cache(
    gm: Any,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile with Inductor; ``mode`` and ``options`` are those of ``torch.compile``."""
    global _tried
    import torch._inductor
    from torch._inductor.compile_fx import compile_fx

    if active() is None and not _tried:
        _tried = True
        try:
            enable()
        except ConfigError as exc:
            logger.warning("s3cache: not enabled, so this compiles without a cache: %s", exc)
    patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **(options or {})}
    return cast(
        "Callable[..., Any]", compile_fx(gm, example_inputs, config_patches=patches or None)
    )
