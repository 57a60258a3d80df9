"""The seam at what programs hand to Inductor and AOTAutograd to compile a graph by.

A backend of the user's may call ``compile_fx`` with decompositions or an ``inner_compile`` of its
own, or AOTAutograd with compilers of its own. The graph that is looked up does not say so.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from s3cache.hooks._patching import Patches
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import Function

__all__ = ["Compilers"]

_ARGUMENTS = ("bw_compiler", "decompositions", "fw_compiler", "inference_compiler", "partition_fn")


class Compilers(threading.local):
    """Knows what compiles the graph that this thread is at.

    Attributes:
        given: what AOTAutograd was handed, by name of the argument; of what Inductor hands it, only
            what a program may have given to Inductor.
    """

    def __init__(self) -> None:
        self.given: Mapping[str, object] = {}

    def install(self, patches: Patches) -> None:
        """See what AOTAutograd is called with: programs may have ``compile_fx`` from before."""
        patches.replace(internals.aot_module, self._autograd)

    def _autograd(self, original: Function[object]) -> Function[object]:
        def aot_module_simplified(*args: object, **kwargs: object) -> object:
            outer = self.given
            self.given = _given(kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self.given = outer

        return aot_module_simplified


def _given(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    inner = internals.inner_compiler(kwargs.get("fw_compiler"))
    if inner is None:
        return {name: kwargs.get(name) for name in _ARGUMENTS}
    return {"inner_compile": inner, "decompositions": kwargs.get("decompositions")}
