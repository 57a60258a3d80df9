"""Names of torch that compute on the device."""

from __future__ import annotations

from s3cache.features.target import FEATURE
from s3cache.torch_api import AnyClass, AnyFunction

_FOLDING = "torch._inductor.constant_folding:ConstantFolder.run"
_UNIFORM = "torch._inductor.fx_passes.joint_graph:UniformValueConstantFolder.__init__"
constant_folders = (
    AnyFunction(_FOLDING, feature=FEATURE.does),
    AnyFunction(_UNIFORM, feature=FEATURE.does),
)
#: Remembers the winner of a kernel on this machine.
save_winner = AnyFunction(
    "torch._inductor.runtime.autotune_cache:AutotuneCache.save", feature=FEATURE.does
)
dispatch_mode = AnyClass("torch.utils._python_dispatch:TorchDispatchMode", feature=FEATURE.does)
tree_map = AnyFunction("torch.utils._pytree:tree_map", feature=FEATURE.does)
#: Registers kernels in a place that we do not search for replacements.
dispatch_library = AnyFunction("torch._C:_dispatch_library", feature=FEATURE.does)
launch_kernel = AnyFunction(
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner.run", feature=FEATURE.does
)
#: Called by C++ to compile, measure and launch a kernel, the first time only.
first_launch = AnyFunction(
    "torch._inductor.runtime.triton_lazy_compile:run_triton_kernel_with_autotune",
    since=(2, 12),
    feature=FEATURE.does,
)
