"""``torch.compile(model, backend="s3cache")``: Inductor with the cache, configured by environment.

torch finds it through the entry point group ``torch_dynamo_backends``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from s3cache.hooks._session import active, enable_by_environment
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import Function


def s3cache(
    gm: GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Function[object]:
    """Compile with Inductor; ``mode`` and ``options`` are those of ``torch.compile``."""
    if active() is None:
        enable_by_environment()
    # What ``backend="inductor"`` stands for; it checks mode and options.
    return internals.inductor_backend.get()(mode, options, None)(gm, example_inputs)
