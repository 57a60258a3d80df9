"""The seam at backwards that compiled autograd asks a hit for: read anew with every call in them.

torch keeps such a graph as the text of a function, and traces that to have a graph again. Plain
tracing sees an operator only by a proxy among its arguments, right there: of ``expand(x, [6, s0])``
it makes an error, and it runs what has no arguments of the graph, so that a backward which draws
random numbers would have the same ones in every step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import Graph, Tracer
    from torch.fx.node import Argument, Target
    from torch.nn import Module

    from s3cache.hooks._patching import Patches
    from s3cache.torch_api.protocols import BackwardModule, Function

__all__ = ["BackwardModules"]


class BackwardModules:
    """Has the graph of a backward made from its text by a tracer that sees every operator."""

    def install(self, patches: Patches) -> None:
        """Replace how torch makes it."""
        patches.replace(internals.deserialize_backward, self._deserializer)

    def _deserializer(self, original: Function[object]) -> Function[object]:
        def deserialize(module: BackwardModule) -> object:
            body, *rest = module.args
            if body.get("_tracer_cls") is not None:
                return original(module)  # not AOTAutograd's: whoever traced it knows how
            # In a copy: the program may ask for it more than once.
            return module.fn({**body, "_tracer_cls": _tracer()}, *rest)

        return deserialize


@functools.cache
def _tracer() -> type[Tracer]:
    from torch.fx import Tracer
    from torch.overrides import TorchFunctionMode

    class Recording(TorchFunctionMode):
        def __init__(self, tracer: Tracer) -> None:
            super().__init__()
            self._tracer = tracer

        def __torch_function__(
            self,
            func: object,
            types: object,
            args: tuple[Argument, ...] = (),
            kwargs: Mapping[str, Argument] | None = None,
        ) -> object:
            if isinstance(func, internals.operator.get()):
                return self._tracer.create_proxy(
                    "call_function", cast("Target", func), args, {**(kwargs or {})}
                )
            return cast("Function[object]", func)(*args, **(kwargs or {}))

    class EveryOperator(Tracer):
        def trace(
            self,
            root: Module | Function[object],
            concrete_args: dict[str, object] | None = None,
        ) -> Graph:
            with Recording(self):
                return super().trace(root, concrete_args)

    return EveryOperator
