"""Names of torch for kernels on accelerators, and our names in entries with such kernels."""

from __future__ import annotations

from s3cache.features.device import FEATURE, SEALING
from s3cache.torch_api import AnyClass, AnyFunction

_CODE = "torch._inductor.codecache"
_TUNER = "torch._inductor.runtime.triton_heuristics:CachingAutotuner"

#: Computes torch's name for a loaded kernel from its source.
kernel_key = AnyFunction(
    "torch._inductor.async_compile:CompiledTritonKernels.key", feature=FEATURE.does
)
autotuner = AnyClass(_TUNER, feature=SEALING)
#: Measures the configurations of a kernel; a search for better ones may follow.
measure = AnyFunction(f"{_TUNER}.autotune_to_one_config", feature=SEALING)
descend = AnyFunction(f"{_TUNER}.coordinate_descent_tuning", feature=SEALING)
combine = AnyFunction(f"{_TUNER}._combo_sequential_autotune", since=(2, 13), feature=SEALING)
#: Called by C++ to compile, measure and launch a kernel, the first time only.
first_launch = AnyFunction(
    "torch._inductor.runtime.triton_lazy_compile:run_triton_kernel_with_autotune",
    since=(2, 12),
    feature=SEALING,
)
triton_files_class = AnyClass(
    "torch._inductor.triton_bundler:TritonKernelArtifacts", feature=SEALING
)
triton_file_class = AnyClass("torch._inductor.triton_bundler:TritonKernelArtifact", feature=SEALING)
code_hash = AnyFunction(f"{_CODE}:code_hash", feature=SEALING)

#: In the ``meta`` of an entry: kernels that a hit compiles or measures, each with the reason.
LEFT = "left"
#: The attribute of a compiled graph that holds the fastest configurations of its kernels, as torch
#: remembers them, by the digest of their source.
REMEMBERED = "s3cache_winners"
#: On a kernel in an entry: torch's marks on a winner that was found by a search.
SEARCHED = "s3cache_searched"
