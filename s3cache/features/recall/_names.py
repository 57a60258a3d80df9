"""Names of torch that recall needs: what Dynamo reads, guards and returns."""

from __future__ import annotations

from s3cache.torch_api import AnyClass, AnyFunction, AnyObject, Fields, Internal

FEATURE = "recalling frames without tracing them (recall)"

_BUILDER = "torch._dynamo.variables.builder"
_GUARDS = "torch._dynamo.guards"
_PGO = "torch._dynamo.pgo"
_STATE = "torch._dynamo.output_graph:OutputGraphGuardsState"
DDP_OPTIMIZER = "torch._dynamo.backends.distributed"

check_functions = AnyFunction(f"{_GUARDS}:CheckFunctionManager.__init__", feature=FEATURE)
build_guards = AnyFunction(f"{_GUARDS}:CheckFunctionManager.build_guards", feature=FEATURE)
build_variable = AnyFunction(f"{_BUILDER}:VariableBuilder.__call__", feature=FEATURE)
build_sourceless = AnyFunction(f"{_BUILDER}:SourcelessBuilder.create", feature=FEATURE)
record_automatic_dynamic = AnyFunction(f"{_BUILDER}:record_automatic_dynamic", feature=FEATURE)
update_automatic_dynamic = AnyFunction(f"{_PGO}:update_automatic_dynamic", feature=FEATURE)
auto_dynamic = AnyObject(f"{_PGO}:auto_dynamic", feature=FEATURE)
cache_key_tag = Internal[str]("torch.compiler.config:cache_key_tag", feature=FEATURE)
exceeds_recompile_limit = AnyFunction(
    "torch._dynamo.cache_size:exceeds_recompile_limit", feature=FEATURE
)
guards_state = AnyClass(_STATE, feature=FEATURE)
Fields(
    _STATE,
    """local_scope global_scope torch_function_mode_stack guard_on_key_order
    input_source_to_sizes_strides dual_level functorch_layers current_device global_state_guard
    _guards _aotautograd_guards skip_guards_check name_of_builtins_dict_key_in_fglobals""",
    feature=FEATURE,
)
compile_parts = AnyFunction(f"{DDP_OPTIMIZER}:DDPOptimizer.compile_fn", feature=FEATURE)
compiler_config = AnyFunction(
    "torch:_TorchCompileInductorWrapper.get_compiler_config", feature=FEATURE
)
post_compile_hit = AnyFunction(
    "torch._inductor.codecache:FxGraphCache.cache_hit_post_compile", feature=FEATURE
)
boxed_bool = AnyClass("torch._inductor.utils:BoxedBool", feature=FEATURE)
boxed_index = AnyClass("torch._inductor.cudagraph_utils:BoxedDeviceIndex", feature=FEATURE)
Fields(
    "torch._functorch._aot_autograd.autograd_cache:GenericAOTAutogradResult",
    "sanitized_aot_config",
    feature=FEATURE,
)
