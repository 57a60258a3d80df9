"""Names of torch that recall needs: what Dynamo reads, guards and returns.

All are in modules that Dynamo itself imports, except those that are declared with ``LOADING``:
their modules are imported when a recalled frame needs them, and may import torch's compiler.
"""

from __future__ import annotations

from s3cache.torch_api import AnyClass, AnyFunction, AnyObject, Fields, Flag, Internal, Predicate
from s3cache.torch_api.protocols import Function

FEATURE = "recalling frames without tracing them (recall)"
LOADING = "loading the graphs of recalled frames (recall)"

_AUTOGRAD = "torch.autograd"
_VARIABLES = "torch._dynamo.variables"
_BUILDER = f"{_VARIABLES}.builder"
_BUILTIN = f"{_VARIABLES}.builtin:BuiltinVariable"
_C = "torch._C"
_CONFIG = "torch._dynamo.config"
DECORATORS = "torch._dynamo.decorators"
_FRAME = "torch._dynamo.convert_frame"
_GUARDS = "torch._dynamo.guards"
_MODULE = f"{_VARIABLES}.misc:PythonModuleVariable"
_PGO = "torch._dynamo.pgo"
_STATE = "torch._dynamo.output_graph:OutputGraphGuardsState"
_TYPES = "torch._dynamo.types"
_UTILS = "torch._dynamo.utils"
_WRAPPER = "torch:_TorchCompileInductorWrapper"

# -- what Dynamo reads

#: What an autocast object sets when it is entered, which has no sources.
AUTOCAST = Fields(
    "torch.amp.autocast_mode:autocast.__init__",
    "device fast_dtype _enabled _cache_enabled",
    feature=FEATURE,
)

sources = AnyObject("torch._dynamo.source", feature=FEATURE)
source_class = AnyClass("torch._guards:Source", feature=FEATURE)
build_variable = AnyFunction(f"{_BUILDER}:VariableBuilder.__call__", feature=FEATURE)
make_constant = AnyFunction(f"{_VARIABLES}.constant:ConstantVariable.__init__", feature=FEATURE)
make_random = AnyFunction(f"{_VARIABLES}.misc:RandomVariable.__init__", feature=FEATURE)
run_comptime = AnyFunction(f"{_VARIABLES}.misc:ComptimeVariable.call_function", feature=FEATURE)
set_methods = (
    AnyFunction(f"{_VARIABLES}:SetVariable._fast_set_method", feature=FEATURE),
    AnyFunction(
        f"{_VARIABLES}.sets:BaseSetVariable._fast_set_method", since=(2, 15), feature=FEATURE
    ),
)
make_set = (
    AnyFunction(f"{_VARIABLES}:SetVariable.__init__", until=(2, 15), feature=FEATURE),
    AnyFunction(f"{_VARIABLES}.sets:BaseSetVariable.__init__", since=(2, 15), feature=FEATURE),
)
#: What evaluates ``is`` and other comparisons, by name.
comparisons = AnyObject("torch._dynamo.symbolic_convert:compare_op_handlers", feature=FEATURE)
_OPTIMIZER = f"{_VARIABLES}.optimizer:OptimizerVariable"
call_optimizer = AnyFunction(f"{_OPTIMIZER}.call_method", until=(2, 15), feature=FEATURE)
init_group = AnyFunction(f"{_OPTIMIZER}._init_group", since=(2, 15), feature=FEATURE)
build_sourceless = AnyFunction(f"{_BUILDER}:SourcelessBuilder.create", feature=FEATURE)
# Calls and accesses in which Dynamo may fold an answer of the process.
is_instance = AnyFunction(f"{_BUILTIN}.call_isinstance", feature=FEATURE)
is_subclass = AnyFunction(f"{_BUILTIN}.call_issubclass", feature=FEATURE)
text_of = AnyFunction(f"{_BUILTIN}.call_str", feature=FEATURE)
#: Functions that Dynamo has bound to these methods, by function and types of arguments.
handlers = AnyObject(f"{_BUILTIN}.call_function_handler_cache", feature=FEATURE)
call_polyfilled = AnyFunction(
    f"{_VARIABLES}.functions:PolyfilledFunctionVariable.call_function", feature=FEATURE
)
call_skipped = AnyFunction(
    f"{_VARIABLES}.functions:SkipFunctionVariable.call_function", feature=FEATURE
)
call_torch = AnyFunction(
    f"{_VARIABLES}.torch:TorchInGraphFunctionVariable.call_function", feature=FEATURE
)
folded = AnyObject(f"{_VARIABLES}.torch:constant_fold_functions", feature=FEATURE)
is_constant_class = AnyFunction("torch.utils._pytree:is_constant_class", feature=FEATURE)
has_attribute = AnyFunction(f"{_MODULE}.call_obj_hasattr", feature=FEATURE)
attribute_of_module = AnyFunction(f"{_MODULE}.var_getattr", until=(2, 14), feature=FEATURE)
attribute_of_module_now = AnyFunction(f"{_MODULE}.tp_getattro_impl", since=(2, 14), feature=FEATURE)
subscript = AnyFunction(
    f"{_VARIABLES}.dicts:ConstDictVariable.getitem_const_raise_exception_if_absent", feature=FEATURE
)
load_builtin = AnyFunction(
    "torch._dynamo.symbolic_convert:InstructionTranslatorBase.load_builtin_from_argval",
    feature=FEATURE,
)
import_module = AnyFunction("torch._dynamo.symbolic_convert:_import_module", feature=FEATURE)
#: Functions, by address, for which Dynamo traces others; and all with another treatment.
polyfilled = AnyObject("torch._dynamo.trace_rules:_polyfilled_function_ids", feature=FEATURE)
MARKED_FUNCTIONS = (
    polyfilled,
    *(
        AnyObject(f"torch._dynamo.trace_rules:{name}", feature=FEATURE)
        for name in (
            "_allowed_callable_ids",
            "_disallowed_callable_ids",
            "_leaf_function_ids",
            "_nonstrict_trace_callable_ids",
        )
    ),
)
closure_vars = AnyFunction(f"{_GUARDS}:_get_closure_vars", feature=FEATURE)
dispatch_keys = AnyFunction(f"{_C}:_dispatch_keys", feature=FEATURE)
#: Attributes of tensors with marks of the user, or of Dynamo.
(STATIC_DIMS,) = Fields(f"{DECORATORS}:mark_static", "_dynamo_static_indices", feature=FEATURE)
(DYNAMIC_DIMS,) = Fields(f"{DECORATORS}:mark_dynamic", "_dynamo_dynamic_indices", feature=FEATURE)
(RANGES,) = Fields(
    f"{DECORATORS}:mark_dynamic", "_dynamo_dynamic_range", until=(2, 15), feature=FEATURE
)
Fields(f"{DECORATORS}:_set_dim_range", RANGES, since=(2, 15), feature=FEATURE)
(STATIC_INPUT,) = Fields(
    f"{DECORATORS}:mark_static_address", "_dynamo_static_input_type", feature=FEATURE
)

# -- the state of the process and of a compile

dynamo_options = AnyObject(_CONFIG, feature=FEATURE)
common_options = AnyFunction("torch.compiler.config:get_config_copy", feature=FEATURE)
cache_key_tag = Internal[str]("torch.compiler.config:cache_key_tag", feature=FEATURE)
state_guard = AnyClass(f"{_FRAME}:GlobalStateGuard", feature=FEATURE)
initial_state = AnyObject(f"{_FRAME}:initial_global_state", feature=FEATURE)
error_on_graph_break = AnyFunction(f"{_FRAME}:_get_error_on_graph_break", feature=FEATURE)
bytecode_hooks = AnyObject(f"{_FRAME}:_bytecode_hooks", feature=FEATURE)
stance = AnyObject("torch._dynamo.eval_frame:_stance", feature=FEATURE)
in_compiled_autograd = Flag(
    "torch._dynamo.compiled_autograd:in_compiled_autograd_region", feature=FEATURE
)
profiler_enabled = Predicate(f"{_AUTOGRAD}:_profiler_enabled", feature=FEATURE)
function_modes = Internal[Function[int]](f"{_C}:_len_torch_function_stack", feature=FEATURE)
dispatch_modes = Internal[Function[int]](f"{_C}:_len_torch_dispatch_stack", feature=FEATURE)
in_dispatch_mode = Predicate(
    "torch.utils._python_dispatch:is_in_torch_dispatch_mode", feature=FEATURE
)
functorch_layer = AnyFunction(f"{_C}:_functorch.peek_interpreter_stack", feature=FEATURE)
dual_level = Internal[int](f"{_AUTOGRAD}.forward_ad:_current_level", feature=FEATURE)
saving_hooks = AnyFunction(f"{_C}:_autograd._top_saved_tensors_default_hooks", feature=FEATURE)
#: How tensors are distributed, and what of a mesh differs in each process.
DISTRIBUTED = "torch.distributed.tensor._dtensor_spec"
device_mesh = AnyClass("torch.distributed.device_mesh:DeviceMesh", feature=FEATURE)
distributed_tensor = AnyClass("torch.distributed.tensor:DTensor", feature=FEATURE)
tensor_spec = AnyClass(f"{DISTRIBUTED}:DTensorSpec", feature=FEATURE)
placement = AnyClass("torch.distributed.tensor.placement_types:Placement", feature=FEATURE)
OF_MESH_IN_PROCESS = Fields(
    "torch.distributed.device_mesh:DeviceMesh", "_hash _pg_registry _thread_id", feature=FEATURE
)
modules = AnyObject("torch.nn.modules.module", feature=FEATURE)
tensorifies = AnyFunction(f"{_UTILS}:_is_tensorify_enabled", since=(2, 13), feature=FEATURE)
cudnn_enabled = Predicate(f"{_C}:_get_cudnn_enabled", feature=FEATURE)
private_device = Internal[Function[str]](f"{_C}:_get_privateuse1_backend_name", feature=FEATURE)
exceeds_recompile_limit = AnyFunction(
    "torch._dynamo.cache_size:exceeds_recompile_limit", feature=FEATURE
)
inductor_wrapper = AnyClass(_WRAPPER, feature=FEATURE)
compiler_config = AnyFunction(f"{_WRAPPER}.get_compiler_config", feature=FEATURE)
call_inductor = AnyFunction(f"{_WRAPPER}.__call__", feature=FEATURE)
(ORIGINAL_BACKEND,) = Fields(
    "torch._dynamo.repro.after_dynamo:WrapBackendDebug",
    "_torchdynamo_orig_backend",
    feature=FEATURE,
)

# -- sizes that Dynamo has seen

automatic_dynamic = Flag(f"{_CONFIG}:automatic_dynamic_shapes", feature=FEATURE)
code_state = AnyFunction(f"{_PGO}:get_code_state", feature=FEATURE)
code_id = AnyClass(f"{_PGO}:CodeId", feature=FEATURE)
size_entry = AnyClass(f"{_PGO}:FrameStateSizeEntry", feature=FEATURE)
auto_dynamic = AnyObject(f"{_PGO}:auto_dynamic", feature=FEATURE)
auto_unset = AnyObject(f"{_PGO}:auto_unset", feature=FEATURE)
update_automatic_dynamic = AnyFunction(f"{_PGO}:update_automatic_dynamic", feature=FEATURE)
record_automatic_dynamic = AnyFunction(f"{_BUILDER}:record_automatic_dynamic", feature=FEATURE)

# -- guards

skips_module_hooks = Flag(f"{_CONFIG}:skip_nnmodule_hook_guards", feature=FEATURE)
check_functions = AnyFunction(f"{_GUARDS}:CheckFunctionManager.__init__", feature=FEATURE)
build_guards = AnyFunction(f"{_GUARDS}:CheckFunctionManager.build_guards", feature=FEATURE)
check_manager = AnyClass(f"{_GUARDS}:CheckFunctionManager", feature=FEATURE)
guard_builder = AnyClass(f"{_GUARDS}:GuardBuilder", feature=FEATURE)
guard_manager = AnyClass(f"{_GUARDS}:GuardManagerWrapper", feature=FEATURE)
shape_code = AnyClass(f"{_GUARDS}:ShapeCodeParts", feature=FEATURE)
concrete_size = AnyFunction(f"{_GUARDS}:convert_int_to_concrete_values", feature=FEATURE)
shape_guards = AnyClass("torch.fx.experimental.symbolic_shapes:_ShapeGuardsHelper", feature=FEATURE)
guard_class = AnyClass("torch._guards:Guard", feature=FEATURE)
guard_set = AnyClass("torch._guards:GuardsSet", feature=FEATURE)
compile_context = AnyFunction("torch._guards:compile_context", feature=FEATURE)
compile_context_class = AnyClass("torch._guards:CompileContext", feature=FEATURE)
ordered_set = AnyClass("torch.utils._ordered_set:OrderedSet", feature=FEATURE)
current_device = AnyObject("torch.utils._device:CURRENT_DEVICE", feature=FEATURE)
guards_state = AnyClass(_STATE, feature=FEATURE)
Fields(
    _STATE,
    """local_scope global_scope torch_function_mode_stack guard_on_key_order
    input_source_to_sizes_strides dual_level functorch_layers current_device global_state_guard
    _guards _aotautograd_guards skip_guards_check name_of_builtins_dict_key_in_fglobals""",
    feature=FEATURE,
)

# -- Dynamo's result

guarded_code = AnyClass(f"{_TYPES}:GuardedCode", feature=FEATURE)
wrap_guarded_code = AnyFunction(f"{_TYPES}:wrap_guarded_code", feature=FEATURE)
output_codes = AnyObject(f"{_FRAME}:output_codes", feature=FEATURE)
original_codes = AnyObject(f"{_UTILS}:orig_code_map", feature=FEATURE)
cleanup_hook = AnyFunction(f"{_UTILS}:CleanupHook.create", feature=FEATURE)
cleanups = AnyObject(f"{_UTILS}:CleanupManager.instance", feature=FEATURE)

# -- graphs

#: Attributes of an input of Dynamo's graph, and of the graph.
_CALL_COMPILER = "torch._dynamo.output_graph:OutputGraph._call_user_compiler"
(INPUT_SOURCE,) = Fields(_CALL_COMPILER, "_dynamo_source", feature=FEATURE)
(BREAK_REASON,) = Fields(
    "torch._dynamo.output_graph:OutputGraph.compile_and_call_fx_graph",
    "compile_subgraph_reason",
    feature=FEATURE,
)
OF_GRAPH = Fields(_CALL_COMPILER, "_param_name_to_source _source_to_user_stacks", feature=FEATURE)
symbolic_context = AnyFunction(f"{_BUILDER}:_automatic_dynamic", feature=FEATURE)
preserve_global_state = AnyFunction(f"{_FRAME}:preserve_global_state", feature=FEATURE)
python_dispatcher = AnyFunction("torch._dispatch.python:enable_python_dispatcher", feature=FEATURE)
checkpointed = AnyObject("torch._higher_order_ops.wrap:tag_activation_checkpoint", feature=FEATURE)
DDP_OPTIMIZER = "torch._dynamo.backends.distributed"
compile_parts = AnyFunction(f"{DDP_OPTIMIZER}:DDPOptimizer.compile_fn", feature=LOADING)
Fields(
    f"{DDP_OPTIMIZER}:DDPOptimizer",
    "backend_compile_fn bucket_bytes_cap first_bucket_cap",
    feature=LOADING,
)
post_compile_hit = AnyFunction(
    "torch._inductor.codecache:FxGraphCache.cache_hit_post_compile", feature=LOADING
)
boxed_bool = AnyClass("torch._inductor.utils:BoxedBool", feature=LOADING)
boxed_index = AnyClass("torch._inductor.cudagraph_utils:BoxedDeviceIndex", feature=LOADING)
inductor = AnyObject("torch._inductor", feature=LOADING)
#: Imports much of the compiler, like the next one.
debug = AnyObject("torch._inductor.debug", feature=LOADING)
Fields("torch._inductor.graph:GraphLowering", "save_output_code", feature=LOADING)
Fields(
    "torch._functorch._aot_autograd.autograd_cache:GenericAOTAutogradResult",
    "sanitized_aot_config",
    feature=LOADING,
)
