"""torch's handling of an entry with a Triton kernel, under the hook, without a GPU."""

from __future__ import annotations

from typing import Any

from s3cache.hooks._rebuild import Kernels
from s3cache.hooks._state import CacheCall, CompileState, Patches

KERNEL = "KERNELHASH"


def bundled(files: dict[str, bytes], *static: Any) -> Any:
    """Return a kernel's files, and kernels that torch launches itself, as torch keeps them."""
    from torch._inductor.triton_bundler import (
        TritonBundle,
        TritonKernelArtifact,
        TritonKernelArtifacts,
    )

    artifacts = [TritonKernelArtifact(name, content) for name, content in files.items()]
    return TritonBundle([TritonKernelArtifacts(KERNEL, 0, artifacts)], list(static))


def emit(bundle: Any = None, *, rebuilding: bool = True) -> None:
    """Write an entry's kernels to disk, as torch does at a hit."""
    from torch._inductor.triton_bundler import TritonBundler

    bundle = bundle or bundled({"kernel.cubin": b"verified"})
    patches = Patches()
    state, call = CompileState(), CacheCall()
    call.kernels = {} if rebuilding else None
    patches.install(Kernels(state))
    try:
        with state.entered(call):
            TritonBundler.read_and_emit(bundle)
    finally:
        patches.close()
