"""Marks on entries with kernels of Triton, and how to recognize such entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import CompiledGraph, TritonBundle

#: In the ``meta`` of an entry: kernels that a hit compiles or measures, each with the reason.
LEFT = "left"
#: The attribute of a compiled graph that holds the fastest configurations of its kernels, as torch
#: remembers them, by the digest of their source.
REMEMBERED = "s3cache_winners"
#: On a kernel in an entry: torch's marks on a winner that was found by a search.
SEARCHED = "s3cache_searched"
#: The marks around the source of a kernel in generated C++ (``cpp_wrapper``), which compiles it at
#: the first launch of the kernel.
COMPILES_LATER = 'R"TRITON(', ')TRITON"'


def has_triton(graph: CompiledGraph) -> bool:
    """Return whether a compiled graph has Triton kernels."""
    bundle: TritonBundle | None = getattr(graph, internals.TRITON_BUNDLE, None)
    if bundle is not None and bundle.kernel_artifacts:
        return True
    return COMPILES_LATER[0] in getattr(graph, "source_code", "")
