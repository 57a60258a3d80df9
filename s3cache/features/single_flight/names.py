"""Names of torch that lower a backward together with its forward."""

from __future__ import annotations

from s3cache.torch_api import AnyClass, AnyFunction, Fields, Flag

FEATURE = "compiling a graph with its backward for all ranks at once (single_flight)"

_AOT = "torch._functorch._aot_autograd"
#: Makes the callable of a graph with a backward, which lowers the backward at its first call.
make_autograd_function = AnyFunction(
    f"{_AOT}.graph_compile:_aot_stage2c_make_autograd_function", feature=FEATURE
)
#: Its arguments: the compiler of a backward, the input, and the function that saves the entry.
ARGUMENTS = Fields(
    f"{_AOT}.graph_compile:_aot_stage2c_make_autograd_function",
    """bw_compiler lazy_backward_info try_save_cache_entry compiled_bw_func fw_metadata
    aot_config""",
    added={"bw_compiler": (2, 13)},
    feature=FEATURE,
)
no_autocast = AnyClass("torch._C:_DisableAutocast", feature=FEATURE)
while_lowering = AnyFunction(f"{_AOT}.logging_utils:track_graph_compiling", feature=FEATURE)
#: Whether compiled autograd traces all backwards into one graph, so that none is lowered alone.
compiled_autograd = Flag("torch._dynamo.config:compiled_autograd", feature=FEATURE)
